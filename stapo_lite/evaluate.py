"""stapo evaluate configs/eval.yaml model=... adapter=... [key.sub=value ...] [--processes N]

stapo evaluate compare runs/eval-a runs/eval-b
"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("evaluate")
