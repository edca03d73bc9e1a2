"""What `specllama bench` measures: plain decoding and speculation in turn, on the same prompts.

All variants run over the same two contexts in one process. Every answer starts from empty caches,
has the same number of tokens, and the same prompt and seed as the others of its repetition, so that
a ratio compares like with like. Within a repetition the variants take turns, and who begins moves
on by one each time, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specllama.costs import CostTable
from specllama.errors import SpecllamaError, UsageError
from specllama.generation import Pair, Stats, encode_prompt
from specllama.sampling import SamplingParams
from specllama.workloads import Workload

PLAIN = "plain"
_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Setting:
    """Sampling parameters under the name that they are reported by."""

    name: str
    params: SamplingParams


def settings(temperatures: str, params: SamplingParams, truncated: bool) -> list[Setting]:
    """A setting for each of the temperatures in a text such as "0,0.8,1".

    At a temperature of exactly 1, and unless `truncated`, all tokens stay in: that is the law that
    the model was trained for. Raises UsageError for what is no list of temperatures.
    """
    found: dict[float, Setting] = {}
    for text in temperatures.split(","):
        try:
            temperature = float(text)
        except ValueError:
            raise UsageError(
                f'"{text.strip()}" is no temperature; write numbers and commas, such as 0,0.8,1'
            ) from None
        if temperature == 1 and not truncated:
            whole = replace(params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
            found[temperature] = Setting("1, untruncated", whole)
        else:
            chosen = replace(params, temperature=temperature)
            found[temperature] = Setting(f"{temperature:g}", chosen)
    return list(found.values())


@dataclass(frozen=True)
class Plan:
    """What is run: every workload with every setting, `n_tokens` an answer."""

    workloads: Sequence[Workload]
    settings: Sequence[Setting]
    n_tokens: int = 256
    repetitions: int = 5
    seed: int = 0


@dataclass
class Decodes:
    """The decodes of one model in an answer that gave logits: milliseconds, and how many by rows.

    The prompt's rows give none, so this is the generation phase.
    """

    ms: float = 0.0
    by_rows: dict[int, int] = field(default_factory=dict)

    def add(self, n_rows: int, ms: float) -> None:
        """Count one."""
        self.ms += ms
        self.by_rows[n_rows] = self.by_rows.get(n_rows, 0) + 1

    def priced(self, costs: CostTable) -> float:
        """What they take in milliseconds by a table of costs."""
        return sum(count * costs.ms(n_rows) for n_rows, count in self.by_rows.items())


@dataclass(frozen=True)
class Answer:
    """One answer's statistics, and the decodes behind it where they can be seen."""

    stats: Stats
    target: Decodes = field(default_factory=Decodes)
    draft: Decodes = field(default_factory=Decodes)


@dataclass(frozen=True)
class Variant:
    """A way to answer: a function of prompt, sampling parameters, number of tokens and seed.

    length: its fixed number of draft tokens, None where it has none. must_draft: whether it is an
    error that it drafts nothing.
    """

    name: str
    answer: Callable[[str, SamplingParams, int, int], Answer]
    length: int | None = None
    must_draft: bool = False


@dataclass(frozen=True)
class Step:
    """One answer to be given. repetition: counted from 1; 0 is the warm-up."""

    workload: Workload
    setting: Setting
    repetition: int
    prompt: str
    variant: str


@dataclass
class Cell:
    """All measured answers of one workload with one setting: by variant, repetition and prompt."""

    workload: str
    setting: Setting
    answers: dict[str, list[list[Answer]]]


def schedule(plan: Plan, variants: Sequence[str]) -> Iterator[Step]:
    """Every answer in the order in which they are given."""
    for workload, setting in itertools.product(plan.workloads, plan.settings):
        for name in variants:
            yield Step(workload, setting, 0, workload.prompts[0], name)
        turn = 0
        for repetition in range(1, plan.repetitions + 1):
            for prompt in workload.prompts:
                for name in (*variants[turn:], *variants[:turn]):
                    yield Step(workload, setting, repetition, prompt, name)
                turn = (turn + 1) % len(variants)


def run(
    plan: Plan, variants: Sequence[Variant], tick: Callable[[Step], None] = lambda _: None
) -> Iterator[Cell]:
    """Follow the schedule; a cell as soon as it is complete. tick: told each step as it begins.

    Raises SpecllamaError when a variant drafts nothing though it must.
    """
    by_name = {variant.name: variant for variant in variants}
    steps = schedule(plan, list(by_name))
    for _, group in itertools.groupby(steps, lambda step: (step.workload, step.setting.name)):
        cell: Cell | None = None
        for step in group:
            if cell is None:
                runs: dict[str, list[list[Answer]]] = {
                    name: [[] for _ in range(plan.repetitions)] for name in by_name
                }
                cell = Cell(step.workload.name, step.setting, runs)
            tick(step)
            variant = by_name[step.variant]
            if step.repetition == 0:
                _warm_up(variant, step, plan)
            else:
                answer = variant.answer(
                    step.prompt, step.setting.params, plan.n_tokens, plan.seed + step.repetition
                )
                cell.answers[step.variant][step.repetition - 1].append(answer)
        if cell is not None:
            yield cell


def _warm_up(variant: Variant, step: Step, plan: Plan) -> None:
    n_tokens = min(plan.n_tokens, _WARM_UP_TOKENS)
    answer = variant.answer(step.prompt, step.setting.params, n_tokens, plan.seed)
    if variant.must_draft and not answer.stats.draft_n:
        raise SpecllamaError(
            f"the draft model proposed nothing for the workload {step.workload.name}, though "
            f'"{variant.name}" should; see what `specllama check` says of this pair'
        )


def require_room(pair: Pair, plan: Plan) -> None:
    """Raises UsageError for a prompt that does not fit with its answer, before anything is run."""
    for workload in plan.workloads:
        for prompt in workload.prompts:
            size = len(encode_prompt(pair.tokenizer, prompt))
            if size + plan.n_tokens > pair.target.n_ctx:
                raise UsageError(
                    f"a prompt of {workload.name} has {size} tokens, so that an answer of "
                    f"{plan.n_tokens} does not fit into the context of {pair.target.n_ctx}; raise "
                    "--ctx-size or lower -n"
                )
