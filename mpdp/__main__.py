"""``python -m mpdp`` is ``mpdp``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
