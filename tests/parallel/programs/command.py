"""Run ``mpdp`` with the arguments of this script."""

from mpdp.cli.main import main

raise SystemExit(main())
