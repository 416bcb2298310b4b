"""`jaxcoll compile`: one layer of each kind for GPUs that are not here, at the published shapes, in the named form."""

import json
import subprocess
import sys

import pytest
from tiny_models import SMALL

from models.cli import main
from models.deepseek_v4 import published

KEYS = ["model", "target", "topology", "layers", "compile_seconds"]


def compiled(capsys, *words):
    assert main(["compile", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def own_config(folder, base, **changes):
    """A user's own config.json: a known model's with one attention kind, which compiles fastest."""
    config = {**base, "num_hidden_layers": 2, "num_hash_layers": 0, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "tokens", "sizes"), [(2, 1, (16, 1, 16, 1)), (256, 64, (2048, 1, 128, 16))])
def test_expert_work_follows_the_routed_rows_at_published_shapes(capsys, tmp_path, hosts, tokens, sizes):
    pro = own_config(tmp_path, {**published._BOTH, **published._OWN["pro"]}, compress_ratios=[128, 128])
    record = compiled(capsys, pro, "--hosts", str(hosts), "--tokens-per-gpu", str(tokens))
    assert list(record) == KEYS and record["target"] == "h200" and record["compile_seconds"] > 0
    topology = record["topology"]
    assert tuple(topology[k] for k in ("attn_dp", "attn_tp", "moe_ep", "moe_tp")) == sizes
    (layer,) = record["layers"]
    flops, ep, tp = layer["expert_flops"], sizes[2], sizes[3]
    assert flops["needed"] == hosts * 8 * tokens * 6 // ep * 6 * 7168 * 3072 // tp
    assert flops["needed"] <= flops["compiled"] <= 1.5 * flops["needed"]
    memory = layer["memory"]
    assert memory["weights"] > 384 // ep * 3 * 7168 * 3072 // tp * 2
    assert memory["caches"] == tokens * ((128 + 8192 // 128) * 512 * 2 + 3 * 512 * 4)
    assert 0 < memory["temporaries"] < memory["device"] == 151_397_597_184
    gather = layer["collectives"][0]
    assert (gather["kind"], gather["operand_bytes"]) == ("all_gather", tokens * 7168 * 2)
    assert gather["kernel_strategy"] == "default" and isinstance(gather["async"], bool)


@pytest.mark.slow
def test_a_person_reads_what_moves_while_what_is_computed(capsys, tmp_path):
    tiny = own_config(tmp_path, SMALL, compress_ratios=[0, 0], num_attention_heads=4, o_groups=2)
    words = ("--hosts", "2", "--gpus-per-host", "2", "--moe-backend", "all_to_all", "--dispatch", "normal")
    assert main(["compile", tiny, *words, "--attn-tp", "2", "--target", "b200"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and " for b200, 2 x 2 GPUs: attn_dp 2 x attn_tp 2 = moe_ep 4 x moe_tp 1" in " ".join(out.split())
    assert out.count("layer: collectives in schedule order") == out.count("window layer") == 1
    assert "ragged_all_to_all" in out and "needed by the routed rows" in " ".join(out.split())


@pytest.mark.slow
def test_both_halves_of_a_step_and_copies_of_experts_are_compiled(capsys, tmp_path):
    tiny = own_config(tmp_path, SMALL, compress_ratios=[0, 0], num_attention_heads=4, o_groups=2)
    words = ("--attn-tp", "2", "--moe-ep", "8", "--moe-backend", "all_to_all", "--redundant-experts")
    (once,) = compiled(capsys, tiny, *words, "4")["layers"]
    (halved,) = compiled(capsys, tiny, *words, "12", "--overlap", "two_batch")["layers"]

    def exchanges(layer):
        kinds = [c for c in layer["collectives"] if c["kind"] == "ragged_all_to_all"]
        return len(kinds), sum(c["operand_bytes"] for c in kinds if c["operand_bytes"] < c["result_bytes"])

    assert exchanges(once)[0] == 2 and exchanges(halved) == (4, exchanges(once)[1])  # the same rows in two parts
    an_expert = 3 * SMALL["hidden_size"] * SMALL["moe_intermediate_size"] * 2
    assert halved["memory"]["weights"] - once["memory"]["weights"] == an_expert  # 24 instead of 16 on 8 ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("large",), "unknown model 'large': it must be flash, pro, tiny, a config.json or a folder with one"),
        (("pro", "--attn-dp", "3"), "--attn-dp 3 times --attn-tp 2 does not make the job's 8 GPUs"),
        (("pro", "--moe-ep", "5"), "moe_ep=5 does not divide the world"),
        (("tiny", "--gpus-per-host", "6", "--moe-ep", "6"), "moe_ep=6 does not divide n_routed_experts=16; "),
        (("pro", "--gather", "gather_v", "--attn-tp", "2"), "gather_v is impossible here because"),
        (("pro", "--xla-option", "nonsense"), "--xla-option must be NAME=VALUE, not 'nonsense'"),
        (("tiny", "--xla-option", "xla_no_such=1", "--gpus-per-host", "1"), "No such compile option: 'xla_no_such'"),
        (("pro", "--target", "a100"), "target"),
        (("pro", "--devices", "8"), "compile has no option --devices"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_sentence(capsys, words, said):
    assert main(["compile", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_without_the_plugin_one_sentence_says_how_to_install_it():
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name.startswith('jax_plugins.xla') else real(name, *a)\n"
        "from models.cli import main\n"
        "sys.exit(main(['compile', 'tiny']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "install jax-cuda13-plugin and jax-cuda13-pjrt" in done.stderr and "`aot`" in done.stderr
