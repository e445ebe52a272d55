"""`python -m mlx_paged` is the command `mlx-paged`."""

import sys

from mlx_paged.cli import main

sys.exit(main())
