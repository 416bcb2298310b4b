"""Compile-only GPUs: what they are, what they refuse, and that they are quiet."""

import os
import subprocess
import sys

import pytest

from jaxcoll import targets
from jaxcoll.targets import TargetError, gpu_devices, gpu_mesh

COMPILE = """
import jax
from jaxcoll.targets import compile_only, gpu_mesh
mesh = gpu_mesh("b200", 2, 3, {"attn_dp": 2, "attn_tp": 3})
rows, sums = jax.P(("attn_dp", "attn_tp")), jax.P("attn_dp")
x = jax.ShapeDtypeStruct((12, 4), "bfloat16", sharding=jax.NamedSharding(mesh, rows))
step = jax.shard_map(lambda x: jax.lax.psum(x, "attn_tp"), mesh=mesh, in_specs=rows, out_specs=sums)
print(compile_only(jax.jit(step).lower(x)).as_text())
"""


@pytest.mark.parametrize("platforms", ["cpu", None])
def test_compiling_prints_nothing_of_its_own(platforms):
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    if platforms:
        env["JAX_PLATFORMS"] = platforms
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("HloModule")
    assert "bf16[2,4]{1,0} all-reduce" in done.stdout


def test_the_persistent_cache_keeps_no_program_that_it_could_not_load(tmp_path):
    env = dict(os.environ) | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    local = "jax.jit(jax.numpy.sin).lower(2.0).compile()\n"
    code = COMPILE.replace("print(", local + "print(") + local.replace("sin", "cos")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    kept = {p.name.split("-")[0] for p in tmp_path.iterdir()}
    assert {"jit_sin", "jit_cos"} <= kept
    assert not any("lambda" in name for name in kept)


@pytest.mark.parametrize("target, kind", [("h100", "H100 80GB"), ("h200", "H200"), ("b200", "B200")])
def test_devices_fill_the_mesh_row_major_and_host_by_host(target, kind):
    mesh = gpu_mesh(target, 2, 4, {"attn_dp": 4, "attn_tp": 2})
    assert (mesh.axis_names, mesh.devices.shape) == (("attn_dp", "attn_tp"), (4, 2))
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    assert [d.process_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4
    assert all(kind in d.device_kind for d in mesh.devices.flat)


def test_the_same_arguments_give_the_same_devices():
    assert gpu_devices("h200", 1, 4)[3] is gpu_devices("h200", 1, 4)[3]


def test_bad_sizes_and_targets_are_refused():
    with pytest.raises(TargetError, match="make 6 devices, but 2 hosts of 4 GPUs are 8"):
        gpu_mesh("h200", 2, 4, {"attn_dp": 3, "attn_tp": 2})
    with pytest.raises(TargetError, match="unknown GPU target 'a100'; targets are h100, h200, b200"):
        gpu_mesh("a100", 1, 2, {"attn_dp": 2})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TargetError, match="at least 1, not 0 and 8"):
        gpu_devices("h200", 0, 8)


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="install jax-cuda13-plugin and jax-cuda13-pjrt"):
        gpu_devices("h200", 1, 5)
