"""The console script, and `python -m tokenleap`: the command line."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Nothing is to clean up before `main`, so Ctrl-C ends the imports at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tokenleap.cli import main

if __name__ == "__main__":
    main()
