"""Which implementation of the expert hot paths runs, and the reason given."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxcoll.targets import gpu_devices, gpu_mesh
from pallas_kernels.choice import Choice, Device, choose

CPU = Device("cpu", "cpu", 1)
H200 = Device("gpu", "NVIDIA H200", 132)


@pytest.mark.parametrize(
    ("platform", "kind", "runs"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", True),
        ("gpu", "NVIDIA H200", True),
        ("cuda", "NVIDIA GH200 480GB", True),
        ("gpu", "NVIDIA B200", True),
        ("gpu", "NVIDIA GB300", True),
        ("gpu", "NVIDIA A100-SXM4-80GB", False),
        ("gpu", "NVIDIA GeForce RTX 5090", False),
        ("gpu", "AMD Instinct MI300X", False),
        ("cpu", "H200", False),
        ("tpu", "TPU v5 lite", False),
    ],
)
def test_hopper_and_blackwell_run_pallas_by_default(platform, kind, runs):
    device = Device(platform, kind, 132)
    choice = choose(None, device, width=7168, dtype=jnp.bfloat16, fanout=6)
    assert (device.runs_pallas, choice.kernels) == (runs, "pallas" if runs else "xla")
    assert kind in choice.reason
    if not runs:
        with pytest.raises(ValueError, match=f"kernels='pallas' cannot run here: the device is {kind}"):
            choose("pallas", device, width=7168, dtype=jnp.bfloat16, fanout=6)


def test_the_reason_is_one_sentence():
    arguments: dict[str, Any] = {"width": 4096, "dtype": jnp.bfloat16, "fanout": 6}
    assert choose(None, H200, **arguments) == Choice(
        "pallas", "Pallas is the default, and 4096 channels of bfloat16 fit (on NVIDIA H200).", 132, False
    )
    assert choose("pallas", CPU, **arguments, interpret=True) == Choice(
        "pallas", "Pallas was asked for, and 4096 channels of bfloat16 fit (interpreted).", 1, True
    )
    assert choose("xla", H200, **arguments).reason == "XLA was asked for."
    assert choose(None, CPU, **arguments).reason == (
        "Pallas cannot run here: the device is cpu (cpu), and the kernels are for Hopper and Blackwell GPUs."
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "rows are float16, and the kernels move bfloat16 and float32"),
        ({"width": 0}, "rows have 0 channels, and the kernels take multiples of 256 up to 8192"),
        ({"width": 384}, "rows have 384 channels, and the kernels take multiples of 256 up to 8192"),
        ({"width": 8448}, "rows have 8448 channels, and the kernels take multiples of 256 up to 8192"),
        ({"fanout": 33}, "a token names 33 rows, and the kernels take at most 32"),
        ({"elements": 2**31}, "an array of 2147483648 elements passes the kernels' int32 offsets"),
    ],
)
def test_shapes_that_do_not_fit(change, reason):
    arguments: dict[str, Any] = {"width": 8192, "dtype": jnp.bfloat16, "fanout": 32, "elements": 2**31 - 1}
    assert choose(None, H200, **arguments).kernels == "pallas"
    assert choose(None, H200, **(arguments | change)) == Choice("xla", f"Pallas cannot run here: {reason}.", 132, False)
    with pytest.raises(ValueError, match=f"^kernels='pallas' cannot run here: {reason}$"):
        choose("pallas", H200, **(arguments | change))
    with pytest.raises(ValueError, match=reason):
        choose("pallas", CPU, **(arguments | change), interpret=True)


def test_the_device_is_found_in_the_program():
    assert Device.of_program(jnp.zeros(1)) == Device("cpu", "cpu", 1)
    (h200,) = gpu_devices("h200", 1, 1)
    assert Device.of(h200) == H200
    mesh = gpu_mesh("b200", 1, 2, {"ep": 2})
    found = []

    def program(x):
        found.append(Device.of_program(x))
        return x

    spec = PartitionSpec("ep")
    argument = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
    jax.jit(program).trace(argument)
    jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)).trace(argument)
    assert found == [Device("gpu", "NVIDIA B200", 148)] * 2
