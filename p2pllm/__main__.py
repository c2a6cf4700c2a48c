"""``python -m p2pllm``."""

if __name__ == "__main__":
    try:
        from p2pllm.cli import main

        code = main()
    except KeyboardInterrupt:  # in the middle of an import
        code = 130
    raise SystemExit(code)
