"""stapo export runs/x --out DIR [--merge] [--dtype bfloat16] [--push-to-hub user/name --private]"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("export")
