"""stapo plan configs/qwen14b_qlora.yaml --gpu-memory 24 [--host-memory 64] [key.sub=value ...]

stapo plan configs/qwen8b_lora_server.yaml --gpu-memory 80 --processes 8
"""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("plan")
