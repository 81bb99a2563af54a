import os
import re
from pathlib import Path

import pytest

from components.settings import OF_SOME, SHARED, MeshSettings, WorkerSettings, misspelled
from components.settings_help import role_of
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.frontend.config import FrontendSettings
from services.planner.config import PlannerSettings
from services.prefill.config import PrefillSettings

ALL: list[type[MeshSettings]] = [
    BootstrapSettings,
    DecodeSettings,
    FrontendSettings,
    PlannerSettings,
    PrefillSettings,
]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MESH_")]:
        monkeypatch.delenv(name)


def test_the_command_line_wins_over_the_role_and_the_role_over_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DecodeSettings.read([]).model == "smollm2-135m"
    monkeypatch.setenv("MESH_MODEL", "shared")
    assert DecodeSettings.read([]).model == PrefillSettings.read([]).model == "shared"
    monkeypatch.setenv("MESH_DECODE_MODEL", "mine")
    assert DecodeSettings.read([]).model == "mine"
    assert PrefillSettings.read([]).model == "shared"
    assert DecodeSettings.read(["--model", "now"]).model == "now"


def test_nested_settings_of_both_prefixes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ENGINE__DTYPE", "float32")
    monkeypatch.setenv("MESH_ENGINE__NUM_PAGES", "64")
    monkeypatch.setenv("MESH_DECODE_ENGINE__NUM_PAGES", "128")
    engine = DecodeSettings.read([]).engine
    assert (engine.dtype, engine.num_pages, engine.page_size) == ("float32", 128, 16)


def test_adapters_are_given_one_by_one_or_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = DecodeSettings.read(["--engine.lora", "a=/x", "--engine.lora", "b.2=~/y"]).engine.lora
    assert adapters == {"a": "/x", "b.2": "~/y"}
    monkeypatch.setenv("MESH_ENGINE__LORA", '{"a": "/x", "Org/B": "/y"}')
    assert DecodeSettings.read([]).engine.lora == PrefillSettings.read([]).engine.lora == {"a": "/x", "Org/B": "/y"}
    monkeypatch.setenv("MESH_DECODE_ENGINE__LORA", '{"a": ""}')
    with pytest.raises(SystemExit, match="it must give each adapter a name and a directory"):
        DecodeSettings.read([])


@pytest.mark.parametrize("settings", ALL)
def test_a_process_ignores_a_shared_variable_that_only_others_use(
    settings: type[MeshSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of one compose file share an environment: MESH_TRANSFER_TIMEOUT_S must not stop the frontend.

    Bootstrap took MESH_BOOTSTRAP_TIMEOUT_S for its own setting `timeout_s`, and did not start.
    """
    for name, value in (("bootstrap_timeout_s", 7), ("transfer_timeout_s", 8), ("room_cleanup_s", 9)):
        monkeypatch.setenv(f"MESH_{name.upper()}", str(value))
        read = settings.read([])
        assert getattr(read, name, value) == value
    for name in OF_SOME - set(settings.model_fields):
        assert misspelled({f"MESH_{name.upper()}": "1", f"MESH_{name.upper()}__X": "1"}, settings) == []


@pytest.mark.parametrize("settings", ALL)
def test_a_setting_belongs_to_the_processes_that_use_it(settings: type[MeshSettings]) -> None:
    """`services.frontend --help` listed the times of transfers."""
    services = REPO / "services"
    shared = [services / "worker.py"] if issubclass(settings, WorkerSettings) else []
    sources = [*(services / role_of(settings)).rglob("*.py"), *(REPO / "components" / "http").glob("*.py"), *shared]
    used = set(re.findall(r"\.(\w+)", "".join(path.read_text() for path in sources)))
    assert set(settings.model_fields) - set(MeshSettings.model_fields) - used == set()


def test_a_variable_of_a_role_that_has_no_such_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_FRONTEND_TRANSFER_TIMEOUT_S", "5")
    DecodeSettings.read([])
    with pytest.raises(SystemExit, match="MESH_FRONTEND_TRANSFER_TIMEOUT_S: its service does not use it"):
        FrontendSettings.read([])


def test_every_name_that_may_follow_a_bare_prefix_is_a_setting() -> None:
    assert {name for settings in ALL for name in settings.model_fields} >= OF_SOME


def test_verification_is_set_for_decode_or_for_the_whole_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DecodeSettings.read([]).verify_kv
    assert DecodeSettings.read(["--verify-kv"]).verify_kv
    monkeypatch.setenv("MESH_VERIFY_KV", "true")
    assert DecodeSettings.read([]).verify_kv
    for settings in ALL:
        settings.read([])


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ETCD_URL", "")
    assert BootstrapSettings.read([]).etcd_url == "http://127.0.0.1:2379"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("MESH_ECTD_URL", "unknown setting MESH_ECTD_URL: did you mean MESH_ETCD_URL?"),
        ("MESH_DECODE_MODLE", "unknown setting MESH_DECODE_MODLE: did you mean MESH_DECODE_MODEL?"),
        (
            "MESH_MAX_LOCAL_PREFILL",
            "unknown setting MESH_MAX_LOCAL_PREFILL: did you mean MESH_DECODE_MAX_LOCAL_PREFILL?",
        ),
        (
            "MESH_DECODE_ENGIN__DTYPE",
            "unknown setting MESH_DECODE_ENGIN__DTYPE: did you mean MESH_DECODE_ENGINE__DTYPE?",
        ),
        ("MESH_NO_SUCH_THING", "unknown setting MESH_NO_SUCH_THING: --help-all lists every name"),
    ],
)
def test_a_misspelled_variable_stops_the_start_with_a_hint(
    name: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([])
    assert str(stopped.value) == error


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MESH_DECODE_ENGINE__PAGE_SZE", "64", "page_sze"),
        ("MESH_LEASE_TTL_S", "1", "lease_ttl_s"),
        ("MESH_NAMESPACE", "Two Words", "namespace"),
        ("MESH_OTLP_ENDPOINT", "http://x:abc", "setting otlp_endpoint: give http://HOST:PORT or https://HOST:PORT"),
        ("MESH_OTLP_ENDPOINT", "jaeger:4318", "setting otlp_endpoint: give http://HOST:PORT or https://HOST:PORT"),
        ("MESH_DECODE_ENGINE__PAGE_SIZE", "17", "page_size is 17; it must be one of 16, 32, 64, 128"),
    ],
)
def test_a_wrong_value_stops_the_start_and_names_its_setting(
    name: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([])
    assert error in str(stopped.value)


def test_variables_of_other_roles_are_ignored() -> None:
    environ = {"MESH_PREFILL_ANYTHING": "1", "MESH_ENGINE__DTYPE": "x", "MESH_MODEL": "m", "PATH": "/bin"}
    assert misspelled(environ, DecodeSettings) == []
    assert misspelled(environ, BootstrapSettings) == []
    assert misspelled({"MESH_DECODE_X": "1", "MESH_LOG_LEVEL": "info"}, MeshSettings) == []


def helped(settings: type[MeshSettings], option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        settings.read([option])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("settings", ALL)
def test_help_lists_common_settings_and_help_all_those_of_the_service(
    settings: type[MeshSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` of decode had 266 lines, and settings that decode does not read."""
    short, full = (helped(settings, option, capsys) for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 60
    role = role_of(settings)
    for name in set(settings.model_fields) - {"api_keys", "engine", "tls"}:
        name_of_variable = f"MESH_{name.upper()}" if name in SHARED else f"MESH_{role.upper()}_{name.upper()}"
        assert re.search(rf"^  --{name.replace('_', '-')} .* {name_of_variable}$", full, re.MULTILINE), name
    others = {name for other in ALL for name in other.model_fields} - set(settings.model_fields)
    assert not [name for name in others if f"--{name.replace('_', '-')} " in full]
    assert f"{full.count(' MESH_') - short.count(' MESH_')} more settings: --help-all" in short
    assert "--api-keys " not in full


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--metrics-prot", "3"], "unknown option --metrics-prot: did you mean --metrics-port or --metrics-host?"),
        (["--engine.num-pagess=3"], "unknown option --engine.num-pagess: did you mean --engine.num-pages?"),
        (
            ["3", "--xyz", "4", "--etcd-urll=http://me:secret@a"],
            "unknown option --xyz: --help-all lists every name\nunknown option --etcd-urll: did you mean --etcd-url?",
        ),
        (["secret"], "settings: there is a value without an option"),
    ],
)
def test_an_unknown_option_is_one_line(arguments: list[str], error: str) -> None:
    """It was the usage of all settings. Values may be secrets."""
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read(arguments)
    assert str(stopped.value) == error


@pytest.mark.parametrize("given", [["--model", ""], ["--model="]])
def test_an_empty_option_is_refused(given: list[str]) -> None:
    """`--api-keys-file "$KEYS"` without that variable served everyone."""
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([*given, "--served-model-name", "a="])
    assert str(stopped.value) == "option --model: its value is empty; give one, or leave the option out"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "ENGINE__KV_OFLOAD_GB",
            "engine.kv_ofload_gb: there is no such setting; did you mean engine.kv_offload_gb?",
        ),
        ("ENGINE__MOCK__SPEDUP", "engine.mock.spedup: there is no such setting; did you mean engine.mock.speedup?"),
        ("ENGINE__XYZ", "engine.xyz: there is no such setting; --help-all lists every name"),
    ],
)
def test_a_misspelled_nested_setting_gets_a_hint(monkeypatch: pytest.MonkeyPatch, name: str, error: str) -> None:
    """The error was "Unexpected keyword argument"."""
    monkeypatch.setenv(f"MESH_{name}", "1")
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([])
    assert str(stopped.value) == f"setting {error}"


@pytest.mark.parametrize(
    ("option", "address", "error"),
    [
        ("etcd-url", "htp://x", "etcd_url: htp:// is not http:// or https:// (MESH_ETCD_URL)"),
        ("nats-url", "nats://me:secret@a,tls://b", "nats_url: some addresses are nats:// and some tls://"),
        ("nats-url", "http://me:secret@a", "nats_url: http:// is not nats:// or tls:// (MESH_NATS_URL)"),
        ("etcd-url", "me:secret@http://a", "etcd_url: an address must begin with http:// or https:// (MESH_ETCD_URL)"),
    ],
)
def test_wrong_addresses_of_servers_are_refused_at_once(option: str, address: str, error: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([f"--{option}", address])
    assert str(stopped.value).startswith(f"setting {error}")
    assert "secret" not in str(stopped.value)


def test_help_lists_a_nested_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(DecodeSettings, "--help-all", capsys)
    assert re.search(r"^  --engine.kv-memory-gb X +MESH_ENGINE__KV_MEMORY_GB$", text, re.MULTILINE)
    assert re.search(r"^  --engine.mock.speedup X +MESH_ENGINE__MOCK__SPEEDUP$", text, re.MULTILINE)
    assert "--verify-kv true|false" in text


def test_settings_do_not_change_and_the_state_directory_is_expanded() -> None:
    settings = BootstrapSettings.read(["--state-dir", "~/x"])
    assert settings.home == Path.home() / "x"
    with pytest.raises(ValueError, match="frozen"):
        settings.namespace = "other"  # type: ignore[misc]
