"""Where the golden fixtures lie: config, weights, and what the reference implementation computes."""

from importlib.resources import files
from pathlib import Path

DATA = Path(__file__).parent / "data"

TINY = Path(str(files("models.deepseek_v4") / "demo_model"))  # ships with the package, for `jaxcoll demo`
ODD = DATA / "odd-11"
WIDE = DATA / "wide-21"
