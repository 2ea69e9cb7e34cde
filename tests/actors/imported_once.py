"""What a stage of a fork server imports: says in which process."""

import os

PID = os.getpid()
