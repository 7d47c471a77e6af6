"""``python -m lockstep.cli`` is the ``lockstep`` command, for where no console script was installed."""

from lockstep.cli.main import main

main()
