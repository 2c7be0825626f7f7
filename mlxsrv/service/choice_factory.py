"""From a request whose prompts are tokens to the choices of its reply, each with its job."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from mlxsrv.engine.orders import Job, Turn
from mlxsrv.errors import ContextLengthExceeded
from mlxsrv.generation.parameters import (
    DryPenalty,
    Grammar,
    RepetitionLimit,
    Sampling,
    Steering,
)
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.prompts.planning import PromptPlan
from mlxsrv.service.choice import Choice
from mlxsrv.service.resources import Resources
from mlxsrv.service.scores import Scores
from mlxsrv.text.repetition import RepetitionGuard

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer


# As llama.cpp's server has it by the same option: agents repeat blocks of lines, and tables repeat
# shorter sequences of tokens with reason.
_REPETITION = RepetitionLimit(longest=1024, shortest=16, count=4)

_NO_CONTEXT = 4096  # tokens of an answer where neither the request nor the model has a limit


@dataclass(frozen=True)
class ChoiceFactory:
    """Makes the choices of one reply: the answers to the first prompt, then those to the second.

    Attributes:
        grammar: what each answer, or each call in it, follows, if anything.
        context_length: tokens of prompt and answer together; None: no limit is known.
    """

    resources: Resources
    spec: GenerationSpec
    model: str
    context_length: int | None
    tokenizer: Tokenizer
    plan: PromptPlan
    grammar: Grammar | None
    steering: Steering | None
    turn: Turn

    def make(self) -> list[Choice]:
        """Raises ContextLengthExceeded if a prompt leaves no room for an answer."""
        places = product(range(len(self.plan.prompts)), range(self.spec.choices))
        return [self._make_choice(prompt, answer) for prompt, answer in places]

    def _make_choice(self, prompt_index: int, answer: int) -> Choice:
        spec, tokenizer, prompt = self.spec, self.tokenizer, self.plan.prompts[prompt_index]
        pipeline = tokenizer.pipeline(
            stops=spec.stops,
            chat=self.spec.is_chat,
            thinking=prompt.thinking,
            prompt=prompt.text,
            bound=self.plan.bound,
            calls=self.plan.calls,
            guard=self._make_guard(),
            min_tokens=spec.min_tokens,
        )
        return Choice(
            prompt_index * spec.choices + answer,
            self._make_job(prompt_index, answer),
            pipeline,
            scores=None if spec.logprobs is None else self._make_scores(),
            echo=prompt.text if spec.echoes else "",
            returns_ids=spec.returns_ids,
            spelling=None if spec.prompt_logprobs is None else tokenizer.token_bytes_or_name,
        )

    def _make_guard(self) -> RepetitionGuard | None:
        limit = self.spec.repetition
        if limit is None and self.resources.settings.repetition_detection:
            limit = _REPETITION
        return None if limit is None or limit.longest == 0 else RepetitionGuard(limit)

    def _make_scores(self) -> Scores:
        return Scores(
            self.tokenizer.token_bytes,
            self.tokenizer.token_bytes_or_name,
            strips_space=self.spec.is_chat and self.tokenizer.strips_first_space,
            every=not self.spec.is_chat,
            ends=self.tokenizer.turn_ends,
            markers=self.tokenizer.marks.tokens if self.spec.is_chat else (),
            numbered=self.spec.names_ids,
        )

    def _make_job(self, prompt_index: int, answer: int) -> Job:
        spec, prompt, grammar = self.spec, self.plan.prompts[prompt_index], self.grammar
        budget = self._thinking_budget
        if budget is not None:
            grammar = replace(grammar or Grammar(), budget=budget)
        if grammar is not None and prompt.thinking:
            grammar = replace(grammar, thinking=True)
        return Job(
            id=next(self.resources.job_ids),
            model=self.model,
            prompt=prompt.tokens,
            max_tokens=self._max_tokens(len(prompt.tokens), self.plan.paths[prompt_index]),
            end_tokens=_end_tokens(spec, self.tokenizer, prompt, constrained=self.plan.bound),
            checkpoints=prompt.checkpoints,
            logprobs=spec.logprobs,
            scores=self._scores_of_prompt,
            ranks=spec.prompt_logprobs is not None,
            sampling=_sampling(spec, self.tokenizer, answer, self.plan.dry),
            steering=self.steering,
            bans=self.plan.bans,
            grammar=grammar,
            turn=self.turn,
        )

    @property
    def _thinking_budget(self) -> int | None:
        """The tokens that the thoughts of an answer may take; None: as many as the answer."""
        if not self.spec.is_chat or not self.tokenizer.formats.thoughts.thinks:
            return None
        asked = self.plan.thinking_budget
        budget = self.resources.settings.default_thinking_budget if asked is None else asked
        return None if budget is None or budget < 0 else budget

    @property
    def _scores_of_prompt(self) -> int | None:
        """The number of tokens to score beside each of a prompt; None: prompts have no scores."""
        spec = self.spec
        wanted = (spec.logprobs if spec.echoes else None, spec.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)

    def _max_tokens(self, prompt_tokens: int, param: str) -> int:
        """Return how many tokens an answer may have. Raises ContextLengthExceeded if it is none."""
        given = self.spec.limit
        limit = self.resources.settings.default_max_tokens if given is None else given
        context, whose = self.context_length, "this model's maximum context length is"
        asked = self.spec.context
        if asked is not None and (context is None or asked < context):
            context, param = asked, self.spec.path("context")
            whose = f"{param} is"
        if context is None:
            return _NO_CONTEXT if limit is None else limit
        left = context - prompt_tokens
        limit = max(left, 1) if limit is None else limit
        if left < min(limit, 1):
            raise ContextLengthExceeded(
                f"{whose} {context} tokens; the prompt has {prompt_tokens}, which leaves no room "
                "for an answer",
                param=param,
                tokens=prompt_tokens,
                most=self.context_length,
            )
        return min(left, limit)


def _sampling(
    spec: GenerationSpec, tokenizer: Tokenizer, answer: int, dry: DryPenalty | None
) -> Sampling:
    """The request's parameters, else the model's own of the same names, else none.

    Args:
        answer: which of the answers to the prompt the job makes; each has a seed of its own.
        dry: the penalty for repetitions that the request asks for.
    """
    own, wishes = asdict(tokenizer.defaults), asdict(spec.sampling)
    given = {
        name: value for each in (own, wishes) for name, value in each.items() if value is not None
    }
    seed = given.get("seed")
    given["seed"] = random.getrandbits(63) if seed is None else seed + answer
    given["top_k"] = max(given.get("top_k", 0), 0)
    given["logit_bias"] = tuple(sorted(spec.sampling.logit_bias.items()))
    given["dry"] = dry
    return Sampling(**given)


def _end_tokens(
    spec: GenerationSpec, tokenizer: Tokenizer, prompt: Prompt, *, constrained: bool
) -> frozenset[int]:
    """The tokens that end an answer and are not part of its text.

    An answer that follows a grammar may end with any end token, because the grammar allows none
    before its end. It ends there even with `ignore_eos`: nothing else may follow.
    """
    own = prompt.ends | (
        tokenizer.turn_ends if spec.is_chat or constrained else tokenizer.end_tokens
    )
    if spec.ignore_eos and not constrained:
        own = frozenset()
    return own.union(spec.stop_token_ids)
