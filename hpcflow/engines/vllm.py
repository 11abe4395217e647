"""vLLM inside a worker's ranks: in-process, seeded per sample, weights replaced in place.

Every rank of the pool builds the engine (vLLM's groups are made collectively over the default group);
consecutive ranks, ``tensor_parallel`` of them, share one copy of the weights and run as one engine. Engines
of one pool are then independent of each other.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hpcflow.engines import isolation
from hpcflow.engines.generation import Generated, check_lengths, check_prompts

if TYPE_CHECKING:
    from hpcflow.config import GenerationProtocol, Sampling

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core lives in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

BATCHED_TOKENS = 8192
"""Prompt tokens of one prefill step at least. Chunked prefill stays off: a split prompt crashes seeded
sampling on CPUs, so the budget must exceed every prompt."""


class VLLMEngine:
    """Generation by vLLM. Building it is collective over the pool, everything else over one engine's ranks.

    path: a local Hugging Face folder with its tokenizer. unique: differs between launches and pools; it names
    the shared memory. max_prompt_tokens, max_tokens: what will be asked for at most. ValueError for keys that
    do not fit each other.
    """

    def __init__(
        self,
        path: str,
        *,
        protocol: GenerationProtocol,
        tensor_parallel: int,
        unique: str,
        max_prompt_tokens: int,
        max_tokens: int,
        trust_remote_code: bool = False,
    ) -> None:
        check_lengths(max_prompt_tokens, max_tokens, protocol.max_model_len)
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % tensor_parallel:
            raise ValueError(
                f"protocol.generation.tensor_parallel={tensor_parallel} does not divide the pool's {world} "
                f"ranks; 1 works"
            )
        self.version: int | None = None
        self.tensor_parallel = tensor_parallel
        self.max_model_len = protocol.max_model_len
        self._sandbox = isolation.Sandbox(
            {**ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        )
        with self._sandbox.inside(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            import vllm
            from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

            # vLLM would name its shared memory after "env://", which is the same for every job of a machine.
            address = mock.patch.object(
                ExecutorWithExternalLauncher, "_distributed_args", lambda _: (f"env://:{unique}", rank, rank)
            )
            with address:
                self._llm = vllm.LLM(
                    model=path,
                    load_format="dummy",  # the weights come from the training engine; no rank reads them all
                    dtype=protocol.dtype,
                    tensor_parallel_size=tensor_parallel,
                    distributed_executor_backend="external_launcher",
                    enforce_eager=True,
                    enable_chunked_prefill=False,
                    max_model_len=protocol.max_model_len,
                    max_num_seqs=protocol.max_num_seqs,
                    max_num_batched_tokens=max(BATCHED_TOKENS, protocol.max_model_len),
                    kv_cache_memory_bytes=int(protocol.kv_cache_gib * 2**30),
                    logprobs_mode="processed_logprobs",
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    trust_remote_code=trust_remote_code,
                    seed=0,
                )
        dist.barrier()
        # Mapped by now; without a name it cannot outlive a killed process.
        isolation.unlink_shared_memory(unique)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights by full tensors under Hugging Face names, the same on each rank; cached
        prefixes of the old weights are dropped.

        Must come before the first generation. A layer's tensors are held until it is complete, never the
        whole model. RuntimeError when nothing came for a parameter.
        """
        with self._sandbox.inside():
            (missing,) = self._llm.collective_rpc(_reload, args=(weights,))
            self._llm.reset_prefix_cache()
        if missing:
            raise RuntimeError(f"no weights came for {', '.join(missing[:4])} of the generation engine")
        self.version = version

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, greedy: bool = False
    ) -> Generated:
        """One response to each prompt; the random numbers of row i depend on ``seeds[i]`` (in [0, 2**63))
        alone.

        greedy: temperature 0, seeds unused. The ranks of one engine must pass the same arguments
        (RuntimeError on all of them otherwise). ValueError for a prompt that does not fit.
        """
        assert len(prompts) == len(seeds)
        assert self.version is not None, "load_weights comes first"
        self._agree(prompts, seeds, sampling, greedy)
        check_prompts(prompts, sampling.max_tokens, self.max_model_len)
        if not prompts:
            return Generated.of([], [], [])
        # Even with enforce_eager one helper is compiled, by a C++ compiler that a machine may not have.
        with self._sandbox.inside(), torch.compiler.set_stance("force_eager"):
            from vllm import SamplingParams, TokensPrompt

            drawn = (
                {"temperature": 0.0}
                if greedy
                else {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                }
            )
            settings = [
                SamplingParams(
                    **drawn,
                    seed=seed,
                    max_tokens=sampling.max_tokens,
                    stop=list(sampling.stop),
                    stop_token_ids=list(sampling.stop_token_ids),
                    detokenize=bool(sampling.stop),
                    logprobs=0,
                )
                for seed in seeds
            ]
            try:
                outputs = self._llm.generate(
                    [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], settings, use_tqdm=False
                )
            except BaseException:
                self._abandon_requests()
                raise
        completions = [output.outputs[0] for output in outputs]
        return Generated.of(
            [c.token_ids for c in completions],
            [[step[t].logprob for step, t in zip(c.logprobs, c.token_ids, strict=True)] for c in completions],
            [c.finish_reason == "length" for c in completions],
        )

    def _abandon_requests(self) -> None:
        """After an exception: requests that stayed would be run by the next call, which then does not end,
        and blocks of prompts that were scheduled but not computed would count as cached."""
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self._llm.reset_prefix_cache()

    def _agree(self, *arguments: object) -> None:
        """Different inputs on the ranks of one engine would give garbage without an error."""
        if self.tensor_parallel == 1:
            return
        from vllm.distributed.parallel_state import get_tp_group

        text = repr((self.version, *arguments)).encode()
        mine = torch.frombuffer(bytearray(hashlib.blake2b(text, digest_size=16).digest()), dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.tensor_parallel)]
        dist.all_gather(everyone, mine, group=get_tp_group().cpu_group)
        if any(not torch.equal(mine, other) for other in everyone):
            raise RuntimeError(
                "the ranks of one generation engine were given different prompts, seeds, sampling or weight "
                "versions"
            )

    def close(self) -> None:
        """End the engine; another one can be built afterwards. The default process group stays."""
        with self._sandbox.inside(), isolation.default_group_kept():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def _reload(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Replace the weights of vLLM's worker. Returns the names of parameters for which nothing came."""
    model = worker.get_model()
    names, load = {name for name, _ in model.named_parameters()}, model.load_weights

    def note_what_came(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        came = load(weights)
        names.difference_update(came)
        return came

    with mock.patch.object(model, "load_weights", note_what_came):
        worker.reload_weights(weights_iterator=weights)
    _prepare_tied_heads(model)
    return sorted(names)


def _prepare_tied_heads(model: nn.Module) -> None:
    """Give an output head that shares the embedding's weight the new values.

    On CPUs a layer computes with a packed copy of its weight, which vLLM renews when weights come for the
    layer; for a tied head none do.
    """
    seen = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in seen:
            module.quant_method.process_weights_after_loading(module)
        seen.add(id(weight))
