"""stapo train configs/quickstart.yaml [key.sub=value ...] [--processes N] [--dry-run] [--resume [--force]]

The same as `accelerate launch -m stapo_lite.train ...`, which is needed for several machines only.
"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("train")
