"""Check run folders offline: python verify.py runs/DIR, or --all."""

import runpy
from pathlib import Path

if __name__ == "__main__":  # by its path: with -I no folder of ours is searched for modules
    runpy.run_path(str(Path(__file__).with_name("evidence") / "verify.py"), run_name="__main__")
