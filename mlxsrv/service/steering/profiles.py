"""Profiles: named steering that outlives a restart. One may be the default steering of a model.

The store blocks, so it is called in worker threads. Methods that read a profile and then act on it
hold a lock, so that none acts on a profile that has changed meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.errors import InvalidFeatureIndex, ProfileNotFound, SAENotAttached, ServeError
from mlxsrv.generation.steering import ProfileContent, ProfileObject, SteeringObject
from mlxsrv.logs import log
from mlxsrv.models.profile_store import ProfileStore, new_id
from mlxsrv.service.steering.registry import ModelSteering, SteeringRegistry

_log = logging.getLogger("mlxsrv.service")


class Profiles:
    """The profiles of one app. Every method may raise StoreFailed."""

    def __init__(self, registry: SteeringRegistry, store: ProfileStore) -> None:
        self._registry = registry
        self._store = store
        self._changing = anyio.Lock()

    async def all(self) -> list[ProfileObject]:
        """All profiles, sorted by name."""
        return await anyio.to_thread.run_sync(self._store.profiles)

    async def one(self, id: str) -> ProfileObject:
        """Raises ProfileNotFound."""
        return await anyio.to_thread.run_sync(self._store.profile, id)

    async def create(self, content: ProfileContent) -> ProfileObject:
        """Store a new profile. Raises ProfileExists if the name is taken; InvalidFeatureIndex."""
        now = time.time()
        profile = ProfileObject(
            id=new_id(), **msgspec.structs.asdict(content), created_at=now, updated_at=now
        )
        _check_features(profile)
        await anyio.to_thread.run_sync(self._store.add, profile)
        return profile

    async def update(self, id: str, changes: Mapping[str, Any]) -> ProfileObject:
        """Change these fields. A default steering that is this profile changes with it, or ends
        if the profile does not fit any more.

        Raises:
            ProfileNotFound, ProfileExists, InvalidFeatureIndex.
        """
        async with self._changing:
            profile = msgspec.structs.replace(await self.one(id), **changes, updated_at=time.time())
            _check_features(profile)
            await anyio.to_thread.run_sync(self._store.replace, profile)
            for attached in self._registry.with_profile(id):
                self._follow(attached, profile)
        return profile

    def _follow(self, attached: ModelSteering, profile: ProfileObject) -> None:
        try:
            fits = self._registry.for_profile(profile) is attached
        except (SAENotAttached, InvalidFeatureIndex):
            fits = False
        if not fits:
            attached.remove_features(None)
        else:
            attached.values, attached.mode = dict(profile.steering), profile.mode

    async def remove(self, id: str) -> None:
        """Delete a profile. Default steering that is this profile ends. Raises ProfileNotFound."""
        async with self._changing:
            try:
                await anyio.to_thread.run_sync(self._store.remove, id)
            except ProfileNotFound:  # another process may have deleted it: here it ends as well
                self._end(id)
                raise
            self._end(id)

    def _end(self, id: str) -> None:
        for attached in self._registry.with_profile(id):
            attached.remove_features(None)

    # The default steering.

    async def activate_all(self, names: Sequence[str]) -> None:
        """Activate the profiles of these names. A failure is logged, and the server goes on."""
        for name in names:
            try:
                profile = await anyio.to_thread.run_sync(self._store.named, name)
                await self.activate(profile.id)
            except ServeError as error:
                log(_log, logging.ERROR, "profile not activated", name=name, reason=error.message)

    async def activate(self, id: str) -> SteeringObject:
        """Make the profile the default steering of its model.

        Raises:
            ProfileNotFound.
            SAENotAttached: its SAE is not attached at its layer of its model.
            InvalidFeatureIndex: the SAE has no such feature.
        """
        async with self._changing:
            profile = await self.one(id)
            attached = self._registry.for_profile(profile)
            attached.use_profile(profile)
            return attached.as_object

    async def deactivate(self, model: str | None) -> SteeringObject:
        """End a model's active profile, if it has one. Raises ModelNotFound, SAENotAttached."""
        attached = await self._registry.find(model)
        if attached.profile is not None:
            attached.remove_features(None)
        return attached.as_object

    async def deactivate_one(self, id: str) -> SteeringObject:
        """As `deactivate`, for the profile's own model, and only if the profile is active.

        Raises:
            ProfileNotFound, ModelNotFound, SAENotAttached.
        """
        async with self._changing:
            profile = await self.one(id)
            attached = await self._registry.find(profile.model_id)
            if attached.profile == id:
                attached.remove_features(None)
            return attached.as_object

    async def active(self, model: str | None) -> ProfileObject | None:
        """A model's active profile. Raises ModelNotFound."""
        try:
            attached = await self._registry.find(model)
        except SAENotAttached:
            return None
        if attached.profile is None:
            return None
        return await self.one(attached.profile)


def _check_features(profile: ProfileObject) -> None:
    """Raises InvalidFeatureIndex for numbers that no SAE has. Others are checked at activation."""
    for feature in profile.steering:
        if not 0 <= feature < _MOST_FEATURES:
            raise InvalidFeatureIndex(
                f"steering: {feature!r:.30} is no feature of any SAE", param="steering"
            )


_MOST_FEATURES = 10**9
