"""``python -m tgi_cli`` is ``tgi``."""

from tgi_cli.cli.main import main

if __name__ == "__main__":
    main()
