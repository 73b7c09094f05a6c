"""`python -m meshwright`."""

import sys

from meshwright.cli.main import main

sys.exit(main())
