"""What a stage of a fork server imports, and may not fork after."""

import os
import threading

PID = os.getpid()
threading.Thread(target=threading.Event().wait, name="never ends", daemon=True).start()
