"""One side of the iteration benchmark: TRL, in an interpreter that has it (see iteration.py).

    python iteration_trl.py grpo|ppo MODEL_FOLDER PROMPTS.jsonl ITERATIONS

PPO needs TRL 1.12 or older on PYTHONPATH: ``trl.experimental.ppo`` is gone in later ones. Prints seconds per
iteration, wall and CPU of the process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
)
warnings.filterwarnings("ignore")

import torch
import transformers
import trl
from datasets import Dataset
from rule import share_of_low_words
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

ROLLOUTS, GROUP, NEW_TOKENS, KL = 32, 4, 32, 0.04


class Clock(TrainerCallback):
    """Wall and CPU seconds of each training step, generation included."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.last = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        now = time.perf_counter(), time.process_time()
        self.wall.append(now[0] - self.last[0])
        self.cpu.append(now[1] - self.last[1])
        self.last = now


class RuleModel(torch.nn.Module):
    """TRL's PPO wants a reward *model*; `get_reward` is replaced where it is asked for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))


def grpo(
    model: torch.nn.Module, tokenizer: object, prompts: list[str], common: dict, iterations: int, clock: Clock
) -> object:
    arguments = trl.GRPOConfig(
        **common,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        beta=KL,
        num_iterations=1,
        steps_per_generation=1,
        max_steps=iterations,
        temperature=1.0,
        generation_kwargs={"min_new_tokens": NEW_TOKENS, "top_k": 0},
    )

    def reward(completions: list[str], **_: object) -> list[float]:
        return [share_of_low_words("", each, {}) for each in completions]

    return trl.GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[clock],
    )


def ppo(
    model: torch.nn.Module,
    tokenizer: object,
    prompts: list[str],
    common: dict,
    iterations: int,
    clock: Clock,
    folder: str,
) -> object:
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    plain = ppo_trainer.get_reward

    def get_reward(of: torch.nn.Module, texts: torch.Tensor, pad: int, context: int) -> tuple:
        if not isinstance(of, RuleModel):
            return plain(of, texts, pad, context)
        words = tokenizer.batch_decode(texts[:, context:], skip_special_tokens=True)
        return None, torch.tensor([share_of_low_words("", each, {}) for each in words]), None

    ppo_trainer.get_reward = get_reward
    arguments = PPOConfig(
        **common,
        gradient_accumulation_steps=1,
        num_ppo_epochs=1,
        num_mini_batches=1,
        total_episodes=iterations * ROLLOUTS,
        response_length=NEW_TOKENS,
        local_rollout_forward_batch_size=ROLLOUTS,
        kl_coef=KL,
        num_sample_generations=0,
        temperature=1.0,
    )
    model.generation_config.eos_token_id, model.generation_config.top_k = None, 0
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    value = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    rows = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=model,
        ref_model=reference,
        reward_model=RuleModel(),
        train_dataset=rows,
        value_model=value,
        callbacks=[clock],
    )


def main() -> None:
    algorithm, folder, prompts_file, iterations = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open(prompts_file) as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    common = dict(
        output_dir=tempfile.mkdtemp(prefix="trl_"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        per_device_train_batch_size=ROLLOUTS,
        lr_scheduler_type="constant",
    )
    clock = Clock()
    extra = (folder,) if algorithm == "ppo" else ()
    trainer = {"grpo": grpo, "ppo": ppo}[algorithm](
        model, tokenizer, prompts, common, int(iterations), clock, *extra
    )
    trainer.train()
    tokens = [ROLLOUTS * NEW_TOKENS] * len(clock.wall)
    print(
        "RESULT "
        + json.dumps({"version": trl.__version__, "wall": clock.wall, "cpu": clock.cpu, "tokens": tokens})
    )


if __name__ == "__main__":
    main()
