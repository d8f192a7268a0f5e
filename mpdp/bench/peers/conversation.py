"""What every peer says through its pipe: it does what it reads, a JSON object a line, and answers likewise.

First it says ``{"port": P}`` once its modules are imported (P: where rank 0 can be met, 0 for others), then it is told
to join, and says its version. It ends when the pipe is closed.
"""

import json
import os
import queue
import sys
import threading


class Conversation:
    """The pipe. What the peer's libraries print on stdout goes to stderr."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        """Take what the parent says; end with it, wherever the main thread waits."""
        for line in sys.stdin:
            self.lines.put(line)
        os._exit(0)

    def answer(self, **words):
        self.answers.write(json.dumps(words) + "\n")
        self.answers.flush()

    def begin(self, imports, join):
        """Call ``imports() -> port``, then ``join(port, host) -> version``; return whether both went well."""
        try:
            self.answer(port=imports())
            words = json.loads(self.lines.get())
            self.answer(version=join(words["host"], words["port"]))
        except Exception as error:
            self.fail(error)
            return False
        return True

    def serve(self, work):
        """Answer calls with what the methods of ``work`` return, for ever."""
        while True:
            words = json.loads(self.lines.get())
            try:
                self.answer(**getattr(work, words.pop("call"))(**words))
            except Exception as error:
                self.fail(error)

    def fail(self, error):
        self.answer(error=f"{type(error).__name__}: {error}")
