"""Nothing hangs: a failure anywhere ends every rank, with the first one as the reason all of them give.

`failure/watch.py` is what the rest calls; `heartbeats.py` finds ranks that are gone, silent or stuck, over the
connections of `framed_socket.py`.
"""
