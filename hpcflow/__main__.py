"""``python -m hpcflow``: the same as the ``hpcflow`` command."""

import sys

from hpcflow.cli import main

sys.exit(main())
