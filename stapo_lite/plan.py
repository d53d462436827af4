"""stapo plan configs/qwen14b_qlora.yaml --gpu-memory 24 [--host-memory 64] [key.sub=value ...]

stapo plan configs/qwen8b_lora_server.yaml --gpu-memory 80 --processes 8 [--sharded]
"""

from stapo_lite.cli import config_parser
from stapo_lite.config import load_config
from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    parser = config_parser("stapo plan", "Predict a run's memory; exit with 1 where it does not fit.")
    parser.add_argument("--gpu-memory", type=float, required=True, metavar="GIB", help="of each card")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of the host, for each card")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that train, each with a card")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 spreads the base over them")
    given = parser.parse_intermixed_args(arguments)
    with one_line_errors():
        config = load_config(given.config, given.overrides)
        from stapo_lite.model.loading import load_model_config
        from stapo_lite.planning.choice import apply_all, choose, describe
        from stapo_lite.planning.plan import GIB, Cards, make_plan, report

        model = load_model_config(config.model).get_text_config()
        host_memory = given.host_memory and given.host_memory * GIB  # None stays None
        cards = Cards(int(given.gpu_memory * GIB), host_memory, given.processes, given.sharded)
        config = apply_all(config, choose(config, model, cards), model, cards)
        plan = make_plan(config, model, cards)
        print(f"{describe(config, plan, model, cards)}\n{report(plan)}")
        if not plan.problems:
            print("It fits.")
            return
        print("It does not fit.", *plan.problems, sep="\n  ")
    raise SystemExit(1)


if __name__ == "__main__":
    main()
