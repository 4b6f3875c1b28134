"""OpenVINO GenAI's continuous batching over HTTP, reading the same GGUF file, prefix cache on.

Keeps the file's 4-bit weights and OpenVINO's defaults for the CPU (8-bit KV cache).
"""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import openvino
from openvino_genai import py_openvino_genai as genai
from peer_http import Answer, Wish, arguments, serve

_KV_BYTES_PER_GIB = 1 << 30


class OpenVino:
    def __init__(self, model: str, *, threads: int, cache_gib: int, step_tokens: int):
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = cache_gib
        scheduler.max_num_batched_tokens = step_tokens
        properties = {"INFERENCE_NUM_THREADS": threads, "enable_save_ov_model": False}
        self.name = "openvino"
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._arrived = threading.Condition()
        self._waiting: list[tuple[np.ndarray, object, Answer]] = []
        threading.Thread(target=self._generate, daemon=True).start()

    def start(self, wish: Wish) -> Answer:
        text = wish.prompt
        if text is None:
            text = self._tokenizer.apply_chat_template(wish.messages, add_generation_prompt=True)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoded.input_ids.data)
        answer = Answer(self._tokenizer.decode, ids.shape[1])
        with self._arrived:
            self._waiting.append((ids, self._config(wish), answer))
            self._arrived.notify()
        return answer

    def _config(self, wish: Wish) -> object:
        config = genai.GenerationConfig()
        config.max_new_tokens = wish.max_tokens
        config.do_sample = False
        config.ignore_eos = wish.ignore_eos
        config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        if wish.schema is not None:
            structured = genai.StructuredOutputConfig()
            structured.json_schema = json.dumps(wish.schema)
            config.structured_output_config = structured
        return config

    def _generate(self) -> None:
        running: list[tuple[object, Answer]] = []
        while True:
            with self._arrived:
                while not self._waiting and not running:
                    self._arrived.wait()
                arrived, self._waiting = self._waiting, []
            for ids, config, answer in arrived:
                tensor = openvino.Tensor(ids)
                handle = self._pipeline.add_request(next(self._numbers), tensor, config)
                running.append((handle, answer))
            self._pipeline.step()
            running = [(handle, answer) for handle, answer in running if self._read(handle, answer)]

    def _read(self, handle, answer: Answer) -> bool:  # type: ignore[no-untyped-def]
        """Hand over what there is; False at the end."""
        while handle.can_read():
            for output in handle.read().values():
                reason = output.finish_reason
                is_last = reason != genai.GenerationFinishReason.NONE
                is_cut = reason == genai.GenerationFinishReason.LENGTH
                ending = ("length" if is_cut else "stop") if is_last else None
                answer.put(output.generated_ids, ending)
                if is_last:
                    return False
        if handle.get_status() != genai.GenerationStatus.RUNNING:
            answer.put([], "abort")  # out of memory: OpenVINO drops the request
            return False
        return True


def main() -> None:
    args = arguments(__doc__)
    bytes_per_token = 30 * 2 * 3 * (64 + 8)  # layers, k and v, heads, 8-bit values and scales
    cache_gib = -(-args.kv_tokens * bytes_per_token // _KV_BYTES_PER_GIB)
    backend = OpenVino(
        str(args.model), threads=args.threads, cache_gib=cache_gib, step_tokens=args.step_tokens
    )
    serve(backend, args.port)


if __name__ == "__main__":
    main()
