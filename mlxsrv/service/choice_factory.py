"""From a request whose prompts are tokens to the choices of its reply, each with its job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mlxsrv.engine.orders import Job
from mlxsrv.errors import ContextLengthExceeded
from mlxsrv.generation.parameters import Grammar, Steering
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.prompts.planning import PromptPlan
from mlxsrv.service.choice import Choice
from mlxsrv.service.parameters import end_tokens, sampling
from mlxsrv.service.resources import Resources
from mlxsrv.service.scores import Scores

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Prompt, Tokenizer


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

    def make(self) -> list[Choice]:
        """Raises ContextLengthExceeded if a prompt leaves no room for an answer."""
        answers = range(self.spec.choices)
        return [
            self._make_choice(prompt, answer)
            for prompt in range(len(self.plan.prompts))
            for answer in answers
        ]

    def _make_choice(self, prompt_index: int, answer: int) -> Choice:
        spec, tokenizer, prompt = self.spec, self.tokenizer, self.plan.prompts[prompt_index]
        pipeline = tokenizer.pipeline(
            stops=spec.stops,
            chat=self.spec.is_chat,
            thinking=prompt.thinking,
            bound=self.plan.bound,
            tools=self.plan.tool_calls(),
            min_tokens=spec.min_tokens,
        )
        return Choice(
            prompt_index * spec.choices + answer,
            self._make_job(prompt_index, answer),
            pipeline,
            scores=None if spec.logprobs is None else self._make_scores(),
            echo=prompt.text if spec.echoes else "",
            tells_tokens=spec.tells_tokens,
            spelling=None if spec.prompt_logprobs is None else tokenizer.token_bytes_or_name,
        )

    def _find_grammar(self, prompt: Prompt) -> Grammar | None:
        if self.grammar is None or not prompt.thinking:
            return self.grammar
        return msgspec.structs.replace(self.grammar, thinking=True)

    def _make_scores(self) -> Scores:
        return Scores(
            self.tokenizer.token_bytes,
            self.tokenizer.token_bytes_or_name,
            strips_space=self.spec.is_chat and self.tokenizer.strips_first_space,
            every=not self.spec.is_chat,
            ends=self.tokenizer.turn_ends,
            numbered=self.spec.names_ids,
        )

    def _make_job(self, prompt_index: int, answer: int) -> Job:
        spec, prompt = self.spec, self.plan.prompts[prompt_index]
        return Job(
            id=next(self.resources.job_ids),
            model=self.model,
            prompt=prompt.tokens,
            max_tokens=self._max_tokens(len(prompt.tokens), self.plan.paths[prompt_index]),
            end_tokens=end_tokens(
                spec,
                self.tokenizer,
                chat=self.spec.is_chat,
                constrained=self.plan.bound,
                prompt_ends=prompt.ends,
            ),
            checkpoints=prompt.checkpoints,
            logprobs=spec.logprobs,
            scores=self._scores_of_prompt,
            ranks=spec.prompt_logprobs is not None,
            sampling=sampling(spec, self.tokenizer, answer),
            steering=self.steering,
            bans=self.plan.bans,
            grammar=self._find_grammar(prompt),
        )

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
            return limit
        left = context - prompt_tokens
        if left < min(limit, 1):
            raise ContextLengthExceeded(
                f"{whose} {context} tokens; the prompt has {prompt_tokens}, which leaves no room "
                "for an answer",
                param=param,
                tokens=prompt_tokens,
                most=self.context_length,
            )
        return min(left, limit)
