"""HTTP as the machine's pip does it: same certificates, proxy, time limit, retries and credentials."""

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.utils import get_auth_from_url, get_netrc_auth

if TYPE_CHECKING:
    from sm120.stack.resolve.pipconfig import PipConfig

_BACKOFF = 0.25  # seconds before the second retry, doubled with each one
_BACKOFF_MAX = 20.0
_TRY_AGAIN = (500, 502, 503, 504)


class Transport:
    """Makes sessions that are set up as pip is. A session belongs to one thread."""

    def __init__(self, config: "PipConfig") -> None:
        self.retries = max(0, config.retries)
        self._config = config
        self._credentials = dict(config.credentials())

    def session(self) -> requests.Session:
        import urllib3
        from urllib3.exceptions import InsecureRequestWarning

        config = self._config
        session = _Session(_Credentials(self._credentials), verify=config.cert or True)
        retry = urllib3.Retry(
            total=self.retries,
            status_forcelist=_TRY_AGAIN,
            allowed_methods=("GET", "HEAD"),
            backoff_factor=_BACKOFF,
            backoff_max=_BACKOFF_MAX,
            raise_on_status=False,
            respect_retry_after_header=False,  # a server must not be able to say: in a week
        )
        adapter = _Adapter(config.timeout, max_retries=retry)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        if config.trusted_hosts:
            urllib3.disable_warnings(InsecureRequestWarning)
        for host in config.trusted_hosts:
            session.mount(f"https://{host}/", _Trusting(config.timeout, max_retries=retry))
            if ":" not in host:
                session.mount(f"https://{host}:", _Trusting(config.timeout, max_retries=retry))
        if config.client_cert:
            session.cert = config.client_cert
        if config.proxy:
            session.proxies = {"http": config.proxy, "https": config.proxy}
            session.trust_env = False  # the environment's proxy would win over pip's
        return session


class _Adapter(HTTPAdapter):
    """With a time limit for each connection and each read."""

    def __init__(self, timeout: float, **options: Any) -> None:
        self._timeout = timeout
        super().__init__(**options)

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        if options.get("timeout") is None:
            options["timeout"] = self._timeout
        return super().send(request, *args, **options)


class _Trusting(_Adapter):
    """For a host that pip is told to trust whatever its certificate says; what it serves is held to its hash."""

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        options["verify"] = False
        return super().send(request, *args, **options)


class _Credentials(requests.auth.AuthBase):
    """User and password of the host that is asked: from pip's configured URLs, or else from netrc."""

    def __init__(self, known: dict[str, tuple[str, str]]) -> None:
        self._known = known

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        url = request.url or ""
        parts = urlsplit(url)
        names = (parts.netloc, parts.hostname or "")
        found = (
            get_auth_from_url(url)
            if parts.username
            else next((self._known[n] for n in names if n in self._known), None)
        )
        found = found or get_netrc_auth(url)
        if found:
            HTTPBasicAuth(*found)(request)
        return request


class _Session(requests.Session):
    """Credentials go to the host they are for, on redirects too; the environment does not change the certificates."""

    def __init__(self, credentials: _Credentials, *, verify: str | bool) -> None:
        super().__init__()
        self._verify = verify
        self.auth = credentials
        self._credentials = credentials

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        prepared_request.headers.pop("Authorization", None)
        is_downgrade = (response.url or "").startswith("https:") and (prepared_request.url or "").startswith("http:")
        if not is_downgrade:
            self._credentials(prepared_request)

    def merge_environment_settings(self, *args: Any, **options: Any) -> Any:
        settings = super().merge_environment_settings(*args, **options)
        if isinstance(self._verify, str):
            settings["verify"] = self._verify
        return settings
