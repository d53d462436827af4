"""stapo audit runs/x [--out DIR]"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("audit")
