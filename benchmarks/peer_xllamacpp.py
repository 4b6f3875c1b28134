"""llama.cpp's own server out of the wheel `xllamacpp`, with a slot for each stream."""

from __future__ import annotations

import threading

import xllamacpp
from peer_http import arguments


def main() -> None:
    args = arguments(__doc__)
    params = xllamacpp.CommonParams()
    params.model.path = str(args.model)
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.streams
    params.kv_unified = args.variant == "unified"
    # llama.cpp divides the context among the slots unless they share it.
    params.n_ctx = args.kv_tokens if params.kv_unified else args.streams * args.context
    params.n_batch = max(params.n_batch, args.step_tokens)
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, xllamacpp.get_system_info(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
