"""transformers' continuous batching over HTTP: fp32 weights dequantised from the same GGUF file.

It shares pages of equal prefixes, and has no grammars.
"""

from __future__ import annotations

import itertools
import threading

import torch
from peer_http import Answer, Unsupported, Wish, arguments, serve
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

_PAGE = 32
_NEVER = -1  # an end id that no token has


class Transformers:
    def __init__(self, args) -> None:  # type: ignore[no-untyped-def]
        folder, file = args.model.parent, args.model.name
        self.name = "transformers"
        self._tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        batching = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=args.kv_tokens // _PAGE,
            max_batch_tokens=args.step_tokens,
            use_cuda_graph=False,
            use_async_batching=False,
            # The defaults pad every step to the largest one, which a CPU pays for.
            q_padding_interval_size=8,
            kv_padding_interval_size=256,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=_NEVER, pad_token_id=0)
        self._manager = model.eval().init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        self._answers: dict[str, tuple[Answer, int]] = {}
        self._numbers = itertools.count()
        self._manager.start()
        threading.Thread(target=self._dispatch, daemon=True).start()

    def start(self, wish: Wish) -> Answer:
        if wish.schema is not None:
            raise Unsupported("transformers has no JSON schemas")
        if wish.prompt is not None:
            ids = self._tokenizer(wish.prompt)["input_ids"]
        else:
            ids = self._tokenizer.apply_chat_template(
                wish.messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        answer = Answer(self._decode, len(ids))
        request_id = f"r{next(self._numbers)}"
        self._answers[request_id] = (answer, wish.max_tokens)
        end = _NEVER if wish.ignore_eos else self._tokenizer.eos_token_id
        self._manager.add_request(
            ids,
            request_id=request_id,
            max_new_tokens=wish.max_tokens,
            streaming=True,
            eos_token_id=end,
        )
        return answer

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _dispatch(self) -> None:
        """Outputs carry all ids so far; hand over the new ones."""
        sent: dict[str, int] = {}
        while True:
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                continue
            answer, limit = self._answers[output.request_id]
            known = sent.get(output.request_id, 0)
            ids = list(output.generated_tokens)
            sent[output.request_id] = len(ids)
            reason = None
            if output.is_finished():
                reason = "length" if len(ids) >= limit else "stop"
                del sent[output.request_id], self._answers[output.request_id]
            answer.put(ids[known:], reason)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(args.threads)
    serve(Transformers(args), args.port)


if __name__ == "__main__":
    main()
