"""``python -m tgi_cli`` is ``tgi``."""

import sys

if __name__ == "__main__":
    from tgi_cli.cli import server_part

    if server_part.is_server_part(sys.argv[1:]):
        server_part.main()
    else:
        from tgi_cli.cli.main import main

        main()
