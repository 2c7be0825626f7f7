"""What a request's rows have added: what it names itself, a profile, or the default.

Each attachment has a default steering and a monitor, which end with it: they are found by the
attachment's number, so that nothing has to be told when it goes, and what a new one starts with is
fresh. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import anyio.to_thread

from mlxsrv.engine.events import Activations
from mlxsrv.engine.orders import Watch
from mlxsrv.errors import InvalidFeatureIndex, InvalidRequest, ProfileNotFound, SAENotAttached
from mlxsrv.generation import Steering, SteeringMode
from mlxsrv.models.pool.model import Attachment
from mlxsrv.models.pool.pool import Pool
from mlxsrv.models.profile_store import Profile, ProfileStore
from mlxsrv.service.steering.attachments import SAEs
from mlxsrv.service.steering.monitor import Monitor
from mlxsrv.wire.management import MonitorObject, MonitorRequest, SteeringObject
from mlxsrv.wire.requests import GenerationRequest

_MOST_FEATURES = 1000  # of the default steering, as of a request's
_MOST_NAMES = 20  # that a message lists


class Held:
    """What goes with one attachment: the default steering, the profile it is from, a monitor."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.enabled = True
        self.mode: SteeringMode = "additive"
        self.values: dict[int, float] = {}
        self.profile: str | None = None
        self.monitor = Monitor()

    @property
    def shown(self) -> SteeringObject:
        values = dict(sorted(self.values.items()))
        return SteeringObject(enabled=self.enabled, mode=self.mode, values=values)

    def require(self, features: Iterable[int], param: str) -> None:
        """Raises InvalidFeatureIndex for what is no feature of the SAE."""
        d_sae = self.attachment.file.d_sae
        for feature in features:
            if not 0 <= feature < d_sae:
                raise InvalidFeatureIndex(
                    f"{param}: {feature!r:.30} is no feature of {self.attachment.sae_id}, which "
                    f"has 0 to {d_sae - 1}",
                    param=param,
                )

    def change(self, values: Mapping[int, float], mode: SteeringMode | None, param: str) -> None:
        """Set features of the default steering by hand, all or none. Raises InvalidFeatureIndex."""
        self.require(values, param)
        changed = {**self.values, **values}
        if len(changed) > _MOST_FEATURES:
            raise InvalidRequest(
                f"{param}: the default steering can have {_MOST_FEATURES} features at most",
                param=param,
            )
        self.values = changed
        self.mode = mode or self.mode
        self.profile = None

    def drop(self, features: Collection[int] | None) -> None:
        """Take features out of the default steering, or all."""
        gone = set(self.values) if features is None else features
        self.values = {k: value for k, value in self.values.items() if k not in gone}
        self.profile = None

    def follow(self, profile: Profile) -> None:
        """Make a profile that fits the default."""
        self.values, self.mode, self.enabled = dict(profile.steering), profile.mode, True
        self.profile = profile.id


class SteeringDesk:
    """What is steered and watched, of all models of one app."""

    def __init__(self, pool: Pool, saes: SAEs, store: ProfileStore) -> None:
        self._pool = pool
        self._saes = saes
        self._store = store
        self._vectors = pool.vectors
        self._held: dict[str, Held] = {}

    # Attachments.

    def held(self, model: str, *, param: str | None = None) -> Held:
        """What goes with the attachment of the model of this name. Raises SAENotAttached."""
        attachment = self._pool.attachments.get(model)
        if attachment is None:
            self._held.pop(model, None)
            where = "" if param is None else f"{param}: "
            raise SAENotAttached(f"{where}no SAE is attached to {model}", param=param)
        held = self._held.get(model)
        if held is None or held.attachment.number != attachment.number:
            held = self._held[model] = Held(attachment)
        return held

    async def asked(self, model: str | None) -> Held:
        """As `held`, of the model that a request names. Raises ModelNotFound, SAENotAttached."""
        return self.held(await self._saes.name(model))

    def fitting(self, profile: Profile, *, param: str | None = None) -> Held:
        """The attachment that a profile is for.

        Raises:
            SAENotAttached: its SAE is not at its layer of its model.
            InvalidFeatureIndex: the SAE has no such feature.
        """
        model = self._pool.catalogue.name(profile.model_id)
        there = self._pool.attachments.get(model)
        if there is None or (there.sae_id, there.layer) != (profile.sae_id, profile.layer):
            raise SAENotAttached(
                f"the profile {profile.name!r} is for the SAE {profile.sae_id!r:.200} at layer "
                f"{profile.layer} of {profile.model_id!r:.200}, which is not attached",
                param=param,
            )
        held = self.held(model)
        held.require(profile.steering, param or "steering")
        return held

    def following(self, profile: str) -> list[Held]:
        """The attachments whose default steering is this profile."""
        models = [model for model in self._held if model in self._pool.attachments]
        return [held for held in map(self.held, models) if held.profile == profile]

    # Requests.

    async def resolve(self, request: GenerationRequest, model: str) -> Steering | None:
        """What the request's rows have added, of the SAE that is attached now.

        Raises:
            ProfileNotFound, StoreFailed: the profile cannot be had.
            SAENotAttached: what it names is for an SAE that is not there.
            InvalidFeatureIndex: the SAE has no such feature.
            InvalidRequest: a control vector that the model does not have.
        """
        vectors = await self._chosen_vectors(request, model)
        if request.profile is not None or request.steering:
            await self._saes.begin()  # what is to be attached at start counts as attached
        if request.profile is not None:
            profile = await self._profile(request.profile)
            if self._pool.catalogue.name(profile.model_id) != model:
                raise SAENotAttached(
                    f"profile: {profile.name!r} is for {profile.model_id!r:.200}, and this model "
                    f"is {model!r}",
                    param="profile",
                )
            held = self.fitting(profile, param="profile")
            return _steering(held, profile.mode, profile.steering, vectors)
        if request.steering is not None:
            if not request.steering:
                return _steering(None, "additive", {}, vectors)
            held = self.held(model, param="steering")
            held.require(request.steering, "steering")
            mode = request.steering_mode or "additive"
            return _steering(held, mode, request.steering, vectors)
        if model in self._pool.attachments and (held := self.held(model)).enabled:
            return _steering(held, held.mode, held.values, vectors)
        return _steering(None, "additive", {}, vectors)

    async def _profile(self, name: str) -> Profile:
        try:
            return await anyio.to_thread.run_sync(self._store.named, name)
        except ProfileNotFound as error:
            raise ProfileNotFound(error.message, param="profile") from None

    def confirm(
        self, request: GenerationRequest, steering: Steering | None, model: str
    ) -> Steering | None:
        """What was resolved, now that the model is loaded. A default that has ended with its SAE
        is left out.

        Raises:
            SAENotAttached, InvalidRequest: what the request names is not there any more.
        """
        if steering is None:
            return None
        for name, _ in steering.vectors:
            self._require_vector(name, model)
        attachment = self._pool.attachments.get(model)
        number = 0 if attachment is None else attachment.number
        if not steering.values or steering.attachment == number:
            return steering
        if request.steering is None and request.profile is None:
            return _steering(None, "additive", {}, dict(steering.vectors))
        raise SAENotAttached(f"the SAE was detached from {model} while the request waited")

    def record(self, model: str, completion: str, event: Activations) -> None:
        """Note what the watched features made of one token of a completion."""
        if model in self._pool.attachments:
            self.held(model).monitor.record(completion, event)

    # Control vectors.

    async def _chosen_vectors(self, request: GenerationRequest, model: str) -> dict[str, float]:
        """Control vectors and their scales: the request's, or the default model's."""
        asked = request.control_vector
        entry = self._pool.catalogue.known(model)
        if self._vectors and entry is not None and entry.description is None:
            await self._pool.catalogue.refresh()  # for what fits a model that is not loaded
        if asked is None:
            if model != self._pool.catalogue.default:
                return {}
            names = self._vectors_of(model)
            return {each.name: each.scale for each in self._vectors if each.name in names}
        usual = {each.name: each.scale or 1.0 for each in self._vectors}
        if isinstance(asked, str):
            self._require_vector(asked, model)
            return {asked: usual[asked]}
        for name in asked:
            self._require_vector(name, model)
        return asked

    def _require_vector(self, name: str, model: str) -> None:
        names = self._vectors_of(model)
        if name not in names:
            there = ", ".join(map(repr, names[:_MOST_NAMES])) or "none"
            raise InvalidRequest(
                f"control_vector: {model} has no {name!r:.100}; there are: {there}",
                param="control_vector",
            )

    def _vectors_of(self, model: str) -> list[str]:
        """The names of those that fit a model, as far as that is known."""
        there = self._pool.model(model)
        if there is not None and there.loaded is not None:
            return list(there.loaded.vectors)
        entry = self._pool.catalogue.known(model)
        said = None if entry is None else entry.description
        if said is None:
            return [each.name for each in self._vectors]
        return [
            each.name
            for each in self._vectors
            if each.file.width == (said.hidden_size or each.file.width)
            and max(each.file.layers) < (said.layers or max(each.file.layers) + 1)
        ]

    # Monitoring.

    async def configure(self, request: MonitorRequest) -> MonitorObject:
        """Raises ModelNotFound, SAENotAttached, InvalidFeatureIndex, InvalidRequest."""
        held = await self.asked(request.model)
        held.require(request.features or (), "features")
        monitor = held.monitor
        monitor.configure(
            enabled=request.enabled,
            features=request.features,
            top=request.top_k,
            history_size=request.history_size,
        )
        name = held.attachment.model
        watch = Watch(name, monitor.features, monitor.top) if monitor.enabled else Watch(name)
        self._pool.engine.watch(watch)
        return monitor.state


def _steering(
    held: Held | None, mode: SteeringMode, values: Mapping[int, float], vectors: Mapping[str, float]
) -> Steering | None:
    """None if it comes to nothing. To add a feature 0 times is nothing; to clamp it to 0 is not."""
    kept = {feature: value for feature, value in values.items() if value or mode == "clamp"}
    scales = tuple(sorted((name, scale) for name, scale in vectors.items() if scale))
    if held is None or not kept:
        return Steering(vectors=scales) if scales else None
    return Steering(held.attachment.number, mode, tuple(sorted(kept.items())), scales)
