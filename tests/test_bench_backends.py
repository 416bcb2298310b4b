"""The benchmark of the backends times each of them on the same rows; no time is judged."""

from pathlib import Path

from tiny_models import published, random_tensors, write_model

from models.deepseek_v4.bench_backends import BACKENDS, main


def test_every_backend_is_timed_in_turns(tmp_path: Path, capsys):
    config = published(compress_ratios=[0], num_hash_layers=0)
    folder = write_model(tmp_path, config, random_tensors(config))
    assert main([str(folder), "--attn-dp", "2", "--batch", "3", "--rounds", "2"]) == 0
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0].removeprefix("| ") for line in table] == list(BACKENDS)
    assert table[0][2] == "1.00 |" and all(float(ms) > 0 for _, ms, _ in table)


def test_what_cannot_be_measured_is_one_sentence(tmp_path: Path, capsys):
    assert main([str(tmp_path / "nowhere"), "--attn-dp", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "nowhere" in err
