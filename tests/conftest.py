from __future__ import annotations

import signal

# A shell ignores Ctrl-C for what it starts in the background, and so would every server that a test starts and
# interrupts: whoever ignores a signal hands that down.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
