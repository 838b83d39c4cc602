"""`python report.py` and its like stood beside train.py until they moved here: say so, in one line,
for one release.
"""

import shlex
import sys
from pathlib import Path

name = Path(sys.argv[0]).name
command = shlex.join(["python", f"research/{name}", *sys.argv[1:]])
print(f"{name}: error: it has moved to research/: {command}", file=sys.stderr)
sys.exit(2)
