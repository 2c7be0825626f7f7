"""Steering of requests: what a request asks for, a profile, or the default of its model.

Each attachment of an SAE has a default steering and a monitor, which end with it. They are found by
the attachment's number, so nobody has to remove them when it is detached, and a new attachment
starts with new ones. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import anyio.to_thread

from mlxsrv.engine.events import Activations
from mlxsrv.engine.orders import Watch
from mlxsrv.errors import InvalidFeatureIndex, InvalidRequest, ProfileNotFound, SAENotAttached
from mlxsrv.generation.parameters import Steering, SteeringMode
from mlxsrv.generation.spec import SteeringWishes
from mlxsrv.generation.steering import MonitorObject, ProfileObject, SteeringObject
from mlxsrv.models.pool.model import Attachment
from mlxsrv.models.pool.pool import Pool
from mlxsrv.models.profile_store import ProfileStore
from mlxsrv.service.steering.attachments import SAEs
from mlxsrv.service.steering.monitor import Monitor

_MOST_FEATURES = 1000  # of the default steering; a request's may have as many
_MOST_NAMES = 20  # in an error message


class ModelSteering:
    """The default steering of a model with an SAE, the profile it comes from, and the monitor."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.enabled = True
        self.mode: SteeringMode = "additive"
        self.values: dict[int, float] = {}
        self.profile: str | None = None
        self.monitor = Monitor()

    @property
    def as_object(self) -> SteeringObject:
        values = dict(sorted(self.values.items()))
        return SteeringObject(enabled=self.enabled, mode=self.mode, values=values)

    def require_features(self, features: Iterable[int], param: str) -> None:
        """Raises InvalidFeatureIndex if the SAE does not have one of these features."""
        d_sae = self.attachment.file.d_sae
        for feature in features:
            if not 0 <= feature < d_sae:
                raise InvalidFeatureIndex(
                    f"{param}: {feature!r:.30} is no feature of {self.attachment.sae_id}, which "
                    f"has 0 to {d_sae - 1}",
                    param=param,
                )

    def set_features(
        self, values: Mapping[int, float], mode: SteeringMode | None, param: str
    ) -> None:
        """Set features of the default steering, all or none. It is no profile's any more.

        Raises:
            InvalidFeatureIndex: the SAE has no such feature.
            InvalidRequest: there are too many features.
        """
        self.require_features(values, param)
        changed = {**self.values, **values}
        if len(changed) > _MOST_FEATURES:
            raise InvalidRequest(
                f"{param}: the default steering can have {_MOST_FEATURES} features at most",
                param=param,
            )
        self.values = changed
        self.mode = mode or self.mode
        self.profile = None

    def remove_features(self, features: Collection[int] | None) -> None:
        """Remove these features, or all, from the default steering. It is no profile's any more."""
        gone = set(self.values) if features is None else features
        self.values = {k: value for k, value in self.values.items() if k not in gone}
        self.profile = None

    def use_profile(self, profile: ProfileObject) -> None:
        """Make `profile`, which must fit, the default steering."""
        self.values, self.mode, self.enabled = dict(profile.steering), profile.mode, True
        self.profile = profile.id


class SteeringRegistry:
    """The steering and the monitors of all models of one app."""

    def __init__(self, pool: Pool, saes: SAEs, store: ProfileStore) -> None:
        self._pool = pool
        self._saes = saes
        self._store = store
        self._vectors = pool.vectors
        self._by_model: dict[str, ModelSteering] = {}

    # Attachments.

    def get(self, model: str, *, param: str | None = None) -> ModelSteering:
        """The steering of the model of this name. Raises SAENotAttached."""
        attachment = self._pool.attachments.get(model)
        if attachment is None:
            self._by_model.pop(model, None)
            where = "" if param is None else f"{param}: "
            raise SAENotAttached(f"{where}no SAE is attached to {model}", param=param)
        attached = self._by_model.get(model)
        if attached is None or attached.attachment.number != attachment.number:
            attached = self._by_model[model] = ModelSteering(attachment)
        return attached

    async def find(self, model: str | None) -> ModelSteering:
        """As `get`, for the name that a request gives. Raises ModelNotFound, SAENotAttached."""
        return self.get(await self._saes.name(model))

    def for_profile(self, profile: ProfileObject, *, param: str | None = None) -> ModelSteering:
        """The steering of the model that a profile is for.

        Raises:
            SAENotAttached: the profile's SAE is not attached at its layer of its model.
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
        attached = self.get(model)
        attached.require_features(profile.steering, param or "steering")
        return attached

    def with_profile(self, profile: str) -> list[ModelSteering]:
        """The models whose default steering is the profile with this id."""
        models = [model for model in self._by_model if model in self._pool.attachments]
        return [attached for attached in map(self.get, models) if attached.profile == profile]

    # Requests.

    async def resolve(self, wishes: SteeringWishes, model: str) -> Steering | None:
        """The steering of the request's rows, with the SAE that is attached now.

        Raises:
            ProfileNotFound, StoreFailed: the profile cannot be read.
            SAENotAttached: the steering is for an SAE that is not attached.
            InvalidFeatureIndex: the SAE has no such feature.
            InvalidRequest: the model does not have the control vector.
        """
        vectors = await self._chosen_vectors(wishes, model)
        if wishes.profile is not None or wishes.features:
            await self._saes.begin()  # wait for SAEs that are attached at start
        if wishes.profile is not None:
            profile = await self._profile(wishes.profile)
            if self._pool.catalogue.name(profile.model_id) != model:
                raise SAENotAttached(
                    f"profile: {profile.name!r} is for {profile.model_id!r:.200}, and this model "
                    f"is {model!r}",
                    param="profile",
                )
            attached = self.for_profile(profile, param="profile")
            return _steering(attached, profile.mode, profile.steering, vectors)
        if wishes.features is not None:
            if not wishes.features:
                return _steering(None, "additive", {}, vectors)
            attached = self.get(model, param="steering")
            attached.require_features(wishes.features, "steering")
            mode = wishes.mode or "additive"
            return _steering(attached, mode, wishes.features, vectors)
        if model in self._pool.attachments and (attached := self.get(model)).enabled:
            return _steering(attached, attached.mode, attached.values, vectors)
        return _steering(None, "additive", {}, vectors)

    async def _profile(self, name: str) -> ProfileObject:
        try:
            return await anyio.to_thread.run_sync(self._store.named, name)
        except ProfileNotFound as error:
            raise ProfileNotFound(error.message, param="profile") from None

    def confirm(
        self, wishes: SteeringWishes, steering: Steering | None, model: str
    ) -> Steering | None:
        """The rest of a resolved steering, now that the model is loaded. A default steering
        whose SAE was detached meanwhile is left out.

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
        if wishes.features is None and wishes.profile is None:
            return _steering(None, "additive", {}, dict(steering.vectors))
        raise SAENotAttached(f"the SAE was detached from {model} while the request waited")

    def record(self, model: str, completion: str, event: Activations) -> None:
        """Note the activations of the watched features for one token of a completion."""
        if model in self._pool.attachments:
            self.get(model).monitor.record(completion, event)

    # Control vectors.

    async def _chosen_vectors(self, wishes: SteeringWishes, model: str) -> dict[str, float]:
        """Control vectors and their scales: the request's or, for the default model, all."""
        asked = wishes.control_vector
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
        return dict(asked)

    def _require_vector(self, name: str, model: str) -> None:
        names = self._vectors_of(model)
        if name not in names:
            there = ", ".join(map(repr, names[:_MOST_NAMES])) or "none"
            raise InvalidRequest(
                f"control_vector: {model} has no {name!r:.100}; there are: {there}",
                param="control_vector",
            )

    def _vectors_of(self, model: str) -> list[str]:
        """The names of the control vectors that fit a model, as far as that is known."""
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

    async def configure(
        self,
        model: str | None,
        *,
        enabled: bool | None,
        features: Collection[int] | None,
        top: int | None,
        history_size: int | None,
    ) -> MonitorObject:
        """Change what is given of a model's monitor.

        Raises:
            ModelNotFound, SAENotAttached, InvalidFeatureIndex, InvalidRequest.
        """
        attached = await self.find(model)
        attached.require_features(features or (), "features")
        monitor = attached.monitor
        monitor.configure(enabled=enabled, features=features, top=top, history_size=history_size)
        name = attached.attachment.model
        watch = Watch(name, monitor.features, monitor.top) if monitor.enabled else Watch(name)
        self._pool.engine.watch(watch)
        return monitor.report


def _steering(
    attached: ModelSteering | None,
    mode: SteeringMode,
    values: Mapping[int, float],
    vectors: Mapping[str, float],
) -> Steering | None:
    """The steering, or None if it changes nothing. Adding a feature 0 times changes nothing, but
    clamping it to 0 does."""
    kept = {feature: value for feature, value in values.items() if value or mode == "clamp"}
    scales = tuple(sorted((name, scale) for name, scale in vectors.items() if scale))
    if attached is None or not kept:
        return Steering(vectors=scales) if scales else None
    return Steering(attached.attachment.number, mode, tuple(sorted(kept.items())), scales)
