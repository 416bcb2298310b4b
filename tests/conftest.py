"""Eight CPU devices for every test, decided before jax starts; compiled programs are kept between runs."""

import os
import tempfile
from pathlib import Path

DEVICES = 8


def cache_folder() -> Path | None:
    """This user's private folder for compiled programs; None if another user owns the name."""
    folder = Path(tempfile.gettempdir()) / f"jaxcoll-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if folder.stat().st_uid == os.getuid() and not folder.is_symlink() else None


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
# Generating fast code is half of a small program's compile time, and a test runs it a few times only. The HLO is the
# same. Tests of whole commands start processes without this.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
if (cache := cache_folder()) is not None:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    # Tests read scopes and source lines in compiled programs: after an edit, those of the old code are wrong.
    os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "true")

import jax  # noqa: E402

found = jax.devices()
if len(found) != DEVICES or found[0].platform != "cpu":
    raise RuntimeError(f"the tests need {DEVICES} CPU devices, not {found}: jax was started before conftest")
