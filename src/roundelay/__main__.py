"""python -m roundelay."""

import sys

from roundelay.cli.main import main

sys.exit(main())
