"""What the processes of a job compare of weights and traces."""

import numpy as np
import pytest
from golden import TINY
from safetensors.numpy import save_file
from tiny_models import published, random_tensors, write_model

from models.deepseek_v4 import contents
from models.deepseek_v4.checkpoint import CheckpointError
from models.deepseek_v4.config import Config
from models.deepseek_v4.contents import hash_of, weights_hash
from models.deepseek_v4.trace import Trace

CONFIG = published(compress_ratios=[0], num_hash_layers=0)
EXPERT = "layers.0.ffn.experts.1.w2.weight"


@pytest.mark.parametrize("whole", [1 << 22, 1000], ids=["whole", "sampled"])
def test_other_values_names_and_shapes_give_another_hash(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(contents, "WHOLE", whole)

    def found(change=lambda tensors: None) -> str:
        tensors = random_tensors(CONFIG)
        change(tensors)
        write_model(tmp_path, CONFIG, tensors)
        return weights_hash(tmp_path, Config.from_folder(tmp_path))

    same = found()
    assert len(same) == 16 and found() == same
    assert found(lambda tensors: tensors[EXPERT].__imul__(2)) != same
    assert found(lambda tensors: tensors.pop(EXPERT)) != same
    assert found(lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.copy()})) != same
    assert found(lambda tensors: tensors.update({"mtp.0.unused": np.ones(3, np.float32)})) == same


def test_files_do_not_count_and_missing_ones_are_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    write_model(tmp_path, CONFIG, tensors)
    config = Config.from_folder(tmp_path)
    one = weights_hash(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        weights_hash(tmp_path, config)
    names = sorted(tensors)
    for number in range(2):
        save_file({name: tensors[name] for name in names[number::2]}, tmp_path / f"part{number}.safetensors")
    assert weights_hash(tmp_path, config) == one


def test_every_array_of_a_trace_counts():
    trace = Trace.load(TINY, Config.from_folder(TINY))
    same = hash_of(trace.arrays)
    for array in trace.arrays:
        at = (0,) * array.ndim
        array[at] += 1
        assert hash_of(trace.arrays) != same
        array[at] -= 1
