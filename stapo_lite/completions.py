"""stapo completions runs/x [--worst 20] [--step 30]"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("completions")
