"""Resolve AWS credentials, region and S3 endpoint with boto3, and read the settings by which a bucket deletes objects.

Both obstore and pylance get the result, so that they use the same endpoint and the same identity. Resolving may send
requests to STS, SSO or the instance's metadata service for credentials, and none to S3. A bucket's versioning and
lifecycle rules keep deleted objects, or delete others, independently of gc.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import boto3
import botocore.config
import botocore.credentials
import botocore.session
from botocore import UNSIGNED
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound
from botocore.utils import FileWebIdentityTokenLoader

from memwal_ops.errors import InvalidUsageError, StorageCredentialsError
from memwal_ops.storage.errors import translate
from memwal_ops.storage.options import is_true, redact, remember

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from botocore.hooks import BaseEventHooks
    from obstore.store import S3Credential


_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class BucketSettings:
    """What is known of a bucket.

    Attributes:
        versioning: ``Enabled``, ``Suspended`` or ``off``; None if it could not be read.
        expiring: the prefixes below which a lifecycle rule deletes current objects by age.
        expires_noncurrent: whether a rule deletes what versioning keeps.
    """

    versioning: str | None
    why: str = ""
    expiring: tuple[str, ...] = ()
    expires_noncurrent: bool = False


def bucket_settings(access: AwsAccess, bucket: str) -> BucketSettings:
    """Ask for versioning and lifecycle rules: two requests. A store that has neither, or forbids it, gives a reason."""
    session = session_with(access.credentials)
    config = botocore.config.Config(
        connect_timeout=_TIMEOUT_SECONDS, read_timeout=_TIMEOUT_SECONDS, retries={"total_max_attempts": 2},
        signature_version=UNSIGNED if access.credentials is None else None,
    )  # fmt: skip
    client: Any = session.client("s3", region_name=access.region, endpoint_url=access.endpoint, config=config)
    try:
        versioning = client.get_bucket_versioning(Bucket=bucket).get("Status", "off")
    except (BotoCoreError, ClientError) as error:
        return BucketSettings(None, redact(str(error)))
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    except (BotoCoreError, ClientError):  # NoSuchLifecycleConfiguration, or not allowed to ask
        rules = []
    active = [rule for rule in rules if rule.get("Status") == "Enabled"]
    return BucketSettings(
        versioning,
        expiring=tuple(_prefix(rule) for rule in active if {"Days", "Date"} & {*rule.get("Expiration", ())}),
        expires_noncurrent=any("NoncurrentVersionExpiration" in rule for rule in active),
    )


def _prefix(rule: Any) -> str:
    """The prefix that a rule applies to; empty if it has none, also for a rule that filters by tags only."""
    where = rule.get("Filter", {})
    return str(where.get("Prefix") or where.get("And", {}).get("Prefix") or rule.get("Prefix") or "")


DEFAULT_REGION = "us-east-1"
DYNAMODB_ENDPOINT = "dynamodb_endpoint"
"""The storage option of Lance for tables at ``s3+ddb://``."""

# botocore renews credentials that have less than 10 minutes left before it returns them.
# obstore caches them for the provider's time to live; its default of 30 minutes would
# outlive them: t=0 obstore gets a token with 11 minutes left; t=11 the token expires;
# t=30 obstore gets a new one. Every request in between is refused.
_TIME_TO_LIVE = timedelta(minutes=9)
# How long vended credentials without an expiry are used before the catalog is asked for new ones.
_NO_EXPIRY_TTL = timedelta(days=1)

# Options for resolving credentials and endpoint; pylance gets the resolved values instead.
_RESOLVED = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "aws_region",
        "aws_default_region",
        "aws_endpoint",
        "aws_endpoint_url_s3",
        "aws_profile",
        "aws_role_arn",
        "aws_role_session_name",
        "aws_external_id",
        "aws_sts_endpoint",
        "aws_web_identity_token_file",
        "aws_skip_signature",
    }
)


@dataclass(frozen=True, slots=True, repr=False)
class AwsAccess:
    """Resolved access to S3.

    ``credentials`` is botocore's self-renewing object, or None for unsigned requests.
    ``others`` are the given options that do not concern identity, region or endpoint.
    """

    region: str
    endpoint: str | None
    credentials: botocore.credentials.Credentials | None
    others: Mapping[str, str]

    @property
    def expires(self) -> bool:
        """Whether the credentials are temporary (role, SSO, instance profile)."""
        return isinstance(self.credentials, botocore.credentials.RefreshableCredentials)

    def place(self) -> dict[str, str]:
        """Region and endpoint as canonical options, valid for obstore and pylance.

        The endpoint is given under both of its names: both libraries prefer the environment's
        ``AWS_ENDPOINT_URL_S3`` to an explicit ``aws_endpoint``, and would use another endpoint.
        """
        options = {**self.others, "aws_region": self.region}
        if self.endpoint is not None:
            options["aws_endpoint"] = self.endpoint
            options["aws_endpoint_url_s3"] = self.endpoint
            if self.endpoint.lower().startswith("http://"):
                options.setdefault("allow_http", "true")
        if self.credentials is None:
            options["aws_skip_signature"] = "true"
        return options

    def frozen(self) -> dict[str, str]:
        """Current credentials as canonical options; renewed first if they are about to expire.

        Raises ``StorageCredentialsError``: they cannot be renewed.
        """
        if self.credentials is None:
            return {}
        try:
            frozen = self.credentials.get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError) as exc:
            raise translate(exc, path="AWS credentials", action="read") from exc
        if frozen.access_key is None or frozen.secret_key is None:
            raise StorageCredentialsError("The AWS credentials that were found are incomplete.")
        remember([frozen.access_key, frozen.secret_key, frozen.token])
        options = {"aws_access_key_id": frozen.access_key, "aws_secret_access_key": frozen.secret_key}
        if frozen.token:
            options["aws_session_token"] = frozen.token
        elif os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_TOKEN"):
            # pylance would add the environment's token to these keys, and so send a token of another
            # identity to this endpoint. An empty option overrides the environment.
            options["aws_session_token"] = ""
        return options

    def provider(self) -> Callable[[], S3Credential] | None:
        """A self-renewing credential provider for obstore; None for unsigned requests."""
        if (credentials := self.credentials) is None:
            return None

        def provide() -> S3Credential:
            until = datetime.now(UTC) + _TIME_TO_LIVE
            frozen = credentials.get_frozen_credentials()
            if (ends := getattr(credentials, "_expiry_time", None)) is not None:
                # A catalog may vend credentials that end before obstore asks again. obstore takes no other zone.
                until = min(ends, until).astimezone(UTC)
            remember([frozen.access_key, frozen.secret_key, frozen.token])
            key, secret = cast("str", frozen.access_key), cast("str", frozen.secret_key)
            return {"access_key_id": key, "secret_access_key": secret, "token": frozen.token, "expires_at": until}

        return provide

    def renewed_by(self, vend: Callable[[], tuple[Mapping[str, str], datetime | None]], expires: datetime) -> AwsAccess:
        """The same access with these credentials until they expire, and then with those that ``vend`` returns."""

        def metadata(options: Mapping[str, str], ends: datetime | None) -> dict[str, str | None]:
            key, secret = options.get("aws_access_key_id"), options.get("aws_secret_access_key")
            if not key or not secret:
                raise StorageCredentialsError("The catalog vends no credentials for the table any more.")
            token = options.get("aws_session_token")
            now = datetime.now(UTC)
            if ends is not None and ends <= now:
                raise StorageCredentialsError("The catalog vends credentials for the table that have expired.")
            text = (ends or now + _NO_EXPIRY_TTL).isoformat()
            return {"access_key": key, "secret_key": secret, "token": token, "expiry_time": text}

        if self.credentials is None:
            return self
        vended = botocore.credentials.RefreshableCredentials.create_from_metadata(
            metadata(self.frozen(), expires), refresh_using=lambda: metadata(*vend()), method="lance-namespace"
        )
        return replace(self, credentials=vended)


def with_dynamodb(options: Mapping[str, str]) -> dict[str, str]:
    """The options with the endpoint of DynamoDB for pylance, which reads only ``DYNAMODB_ENDPOINT`` by itself.

    ``dynamodb_endpoint``, else ``DYNAMODB_ENDPOINT``, ``AWS_ENDPOINT_URL_DYNAMODB``, ``AWS_ENDPOINT_URL`` or the
    profile's, in that order; none of them: that of AWS. Raises ``StorageCredentialsError``: an unknown profile.
    """
    given = options.get(DYNAMODB_ENDPOINT) or os.environ.get(DYNAMODB_ENDPOINT.upper())
    try:
        endpoint = given or _configured_endpoint(_session(options.get("aws_profile")), "dynamodb")
    except ProfileNotFound as exc:
        raise StorageCredentialsError(f"{exc}.") from exc
    if not endpoint:
        return dict(options)
    if not endpoint.lower().startswith(("http://", "https://")):
        raise InvalidUsageError("The endpoint of DynamoDB must start with http:// or https://.")
    return {**options, DYNAMODB_ENDPOINT: endpoint.rstrip("/")}


def resolve_aws(options: Mapping[str, str]) -> AwsAccess:
    """Resolve canonical options, then the environment and the AWS config files, in that order.

    * credentials: ``aws_access_key_id`` with ``aws_secret_access_key``, else the profile
      (``aws_profile``, ``AWS_PROFILE``), else boto3's chain; ``aws_skip_signature`` for none.
      A profile may itself assume a role, use SSO or run a credential process.
    * ``aws_role_arn``: assumed by STS on top of those, or of ``aws_web_identity_token_file``;
      with ``aws_role_session_name``, ``aws_external_id``, ``aws_sts_endpoint``.
    * endpoint: ``aws_endpoint_url_s3``, ``aws_endpoint``, ``AWS_ENDPOINT_URL_S3``,
      ``AWS_ENDPOINT_URL``, the profile's ``endpoint_url``, ``AWS_ENDPOINT``.
    * region: ``aws_region``, ``aws_default_region``, ``AWS_REGION``, ``AWS_DEFAULT_REGION``,
      the profile's region, else ``us-east-1``.

    Raises:
        InvalidUsageError: options that contradict each other.
        StorageCredentialsError: no credentials, an unknown profile, a role that may not be assumed.
        StoreUnavailableError: STS or the metadata service cannot be reached.
    """
    try:
        session = _session(options.get("aws_profile"))
        region = (
            options.get("aws_region")
            or options.get("aws_default_region")
            or os.environ.get("AWS_REGION")
            or session.get_config_variable("region")
            or DEFAULT_REGION
        )
        return AwsAccess(
            region=region,
            endpoint=_endpoint(session, options),
            credentials=_credentials(session, options, region),
            others={key: value for key, value in options.items() if key not in _RESOLVED},
        )
    except ProfileNotFound as exc:
        raise StorageCredentialsError(f"{exc}.") from exc
    except (BotoCoreError, ClientError, OSError) as exc:
        raise translate(exc, path="AWS credentials", action="read") from exc


def _configured_endpoint(session: botocore.session.Session, service: str) -> str | None:
    given: str | None = ConfiguredEndpointProvider(
        full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name=service
    ).provide()
    return given


def _endpoint(session: botocore.session.Session, options: Mapping[str, str]) -> str | None:
    given = options.get("aws_endpoint_url_s3") or options.get("aws_endpoint")
    if given is None:
        given = _configured_endpoint(session, "s3")
    given = given or os.environ.get("AWS_ENDPOINT")
    if not given:
        return None
    if not given.lower().startswith(("http://", "https://")):
        raise InvalidUsageError("The S3 endpoint must start with http:// or https://.")
    return str(given).rstrip("/")


def _credentials(
    session: botocore.session.Session, options: Mapping[str, str], region: str
) -> botocore.credentials.Credentials | None:
    skip = options.get("aws_skip_signature", os.environ.get("AWS_SKIP_SIGNATURE", "false"))
    if is_true("aws_skip_signature", skip):
        return None
    key, secret = options.get("aws_access_key_id"), options.get("aws_secret_access_key")
    if bool(key) != bool(secret):
        raise InvalidUsageError("aws_access_key_id and aws_secret_access_key must be given together.")
    if options.get("aws_session_token") and not key:
        raise InvalidUsageError("aws_session_token needs aws_access_key_id and aws_secret_access_key.")
    role = options.get("aws_role_arn")
    token_file = options.get("aws_web_identity_token_file")
    if token_file and not role:
        raise InvalidUsageError("aws_web_identity_token_file needs aws_role_arn.")

    def client(service: str, **arguments: Any) -> Any:
        return session.create_client(
            service, region_name=region, endpoint_url=options.get("aws_sts_endpoint") or None, **arguments
        )

    extra = {"RoleSessionName": options.get("aws_role_session_name") or "memwal-ops"}
    if role and token_file:
        by_token = botocore.credentials.AssumeRoleWithWebIdentityCredentialFetcher(
            client_creator=client,
            web_identity_token_loader=FileWebIdentityTokenLoader(token_file),
            role_arn=role,
            extra_args=extra,
        )
        return botocore.credentials.DeferredRefreshableCredentials(
            method="assume-role-with-web-identity", refresh_using=by_token.fetch_credentials
        )
    source: botocore.credentials.Credentials | None
    if key and secret:
        source = botocore.credentials.Credentials(key, secret, options.get("aws_session_token") or None)
    else:
        source = session.get_credentials()
    if source is None:
        raise StorageCredentialsError("No AWS credentials were found in the options, the environment or a profile.")
    if not role:
        return source
    if options.get("aws_external_id"):
        extra["ExternalId"] = options["aws_external_id"]
    by_role = botocore.credentials.AssumeRoleCredentialFetcher(
        client_creator=client, source_credentials=source, role_arn=role, extra_args=extra
    )
    return botocore.credentials.DeferredRefreshableCredentials(
        method="assume-role", refresh_using=by_role.fetch_credentials
    )


@functools.cache
def _events() -> BaseEventHooks:
    """Botocore's event handlers, which it registers in 30 ms of a processor for each session: once in a process."""
    events: BaseEventHooks = botocore.session.Session().get_component("event_emitter")
    return events


def _session(profile: str | None = None) -> botocore.session.Session:
    return botocore.session.Session(
        event_hooks=copy.copy(_events()), include_builtin_handlers=False, profile=profile or None
    )


def session_with(credentials: botocore.credentials.Credentials | None) -> boto3.session.Session:
    """A boto3 session with these credentials; None: for unsigned requests."""

    class Fixed(botocore.credentials.CredentialProvider):
        METHOD = "memwal-ops"

        def load(self) -> botocore.credentials.Credentials | None:
            return credentials

    session = _session()
    session.register_component("credential_provider", botocore.credentials.CredentialResolver([Fixed()]))
    return boto3.session.Session(botocore_session=session)
