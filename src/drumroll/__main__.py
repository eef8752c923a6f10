"""`python -m drumroll` is `drumroll`."""

from drumroll.cli import main

main()
