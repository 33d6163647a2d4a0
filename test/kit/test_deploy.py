# SPDX-License-Identifier: Apache-2.0
"""Container, compose file, systemd unit, recipe and dashboard: linted, parsed and run as far as no engine is needed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ENTRY = DOCKER / "entry.sh"
RECIPE = yaml.safe_load((DOCKER / "kimi-k2.6.yaml").read_text())
TOOLS = Path(sys.executable).parent


def tool(name):
    """A linter that test/requirements.txt installs as a program."""
    found = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is missing: python -m pip install -r test/requirements.txt"
    return found


class TestRecipe:
    """One file holds the flags; everything else reads it."""

    def test_the_server_knows_every_flag_and_value(self):
        """Through SGLang's own parser, as --config reaches it. Flags of the fork are known where it is installed."""
        import argparse

        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        known = {option: action for action in parser._actions for option in action.option_strings}
        ours = {"kdtree-verify", "kv-defrag"}
        installed = "--kdtree-verify" in known
        for key, value in RECIPE.items():
            if key in ours and not installed:
                continue
            action = known[f"--{key}"]
            if action.choices and (installed or key != "attention-backend"):
                assert value in action.choices, key
        if installed:
            from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

            merged = ConfigArgumentMerger(parser).merge_config_with_args(
                ["--config", str(DOCKER / "kimi-k2.6.yaml"), "--kdtree-verify", "off", "--port", "31000"]
            )
            args = parser.parse_args(merged)
            assert args.kdtree_verify == "off"  # the one flag back to stock wins over the recipe
            assert (args.tp_size, args.mem_fraction_static, args.context_length) == (8, 0.93, 200_000)
            assert args.trust_remote_code is True and args.enable_metrics is True

    def test_the_server_accepts_the_flags_together(self):
        """Resolved as at a start, DDTREE's and kdtree_sm120's refusals included; the small model in Kimi's place."""
        models = ROOT / "test" / "models"
        small = {"model-path": models / "target", "speculative-draft-model-path": models / "drafter"}
        if not (models / "target" / "model.safetensors").exists():
            pytest.skip("this checkout has no small model")
        flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in (RECIPE | small).items()]
        program = (
            "import sys; from sglang.srt.server_args import prepare_server_args as prepare; a = prepare(sys.argv[1:]); "
            "print('resolved', a.tp_size, a.attention_backend, a.speculative_algorithm, a.kdtree_verify, a.kv_defrag)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *flags, "--device=cpu", "--dtype=float32"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.stdout.strip().endswith("resolved 8 kdtree_sm120 DDTREE on tier0"), done.stderr[-2000:]

    def test_it_is_what_plan_prints_for_this_machine(self, cli, data):
        _, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json", "--context", 200_000,
            "--mem-fraction-static", RECIPE["mem-fraction-static"],
        )  # fmt: skip
        # A switch of the command line is a true in the recipe.
        flags = {name[2:]: value or "True" for name, value in document["command"]["flags"]}
        planned = {name: value for name, value in flags.items() if not name.endswith("-path")}
        assert {key: str(RECIPE[key]) for key in planned} == planned and "trust-remote-code" in planned
        assert document["rank_bytes"]["margin"] > 0

    def test_no_secret_and_no_address_in_it(self):
        assert not {"host", "port", "api-key", "admin-api-key"} & set(RECIPE)


class TestEntry:
    @pytest.fixture
    def run(self, tmp_path):
        """Run entry.sh with a stand-in for Python that records its arguments and the config file it was given."""
        record = tmp_path / "record"
        python = tmp_path / "python"
        python.write_text(
            "#!/bin/bash\nprintf '%s\\n' \"$@\" > " + str(record) + "\n"
            'while [[ $# -gt 0 ]]; do [[ $1 == --config ]] && { cat "$2"; stat -c %a "$2"; }; shift; done\n'
        )
        python.chmod(0o755)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("tp-size: 8\n")

        def call(*arguments, **environment):
            record.unlink(missing_ok=True)
            done = subprocess.run(
                [ENTRY, *arguments],
                env={
                    "PATH": os.environ["PATH"],
                    "KDTREE_PYTHON": str(python),
                    "KDTREE_RECIPE": str(recipe),
                    **environment,
                },
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            return done, record.read_text().split("\n")[:-1] if record.exists() else None

        return call

    def test_serving_with_the_recipe(self, run):
        done, arguments = run()
        assert done.returncode == 0
        assert arguments[:3] == ["-m", "sglang.launch_server", "--config"]
        assert arguments[4:] == ["--host", "127.0.0.1", "--port", "30000"]
        assert done.stdout == "tp-size: 8\n600\n"

    @pytest.mark.parametrize("arguments", [("serve", "--kdtree-verify", "off"), ("--kdtree-verify", "off")])
    def test_more_flags_come_last_and_win(self, run, arguments):
        _, got = run(*arguments, KDTREE_PORT="31111")
        assert got[-4:] == ["--port", "31111", "--kdtree-verify", "off"]

    def test_the_key_is_not_on_the_command_line(self, run, tmp_path):
        key = tmp_path / "key"
        key.write_text("0123456789abcdef-secret\n")
        done, arguments = run("serve", KDTREE_HOST="0.0.0.0", KDTREE_API_KEY_FILE=str(key))
        assert done.returncode == 0 and "secret" not in " ".join(arguments)
        config = yaml.safe_load(done.stdout.rsplit("\n", 2)[0])
        assert config == {"tp-size": 8, "api-key": "0123456789abcdef-secret"}

    def test_systemds_credential_is_found(self, run, tmp_path):
        (tmp_path / "api-key").write_text("0123456789abcdef")
        done, _ = run("serve", CREDENTIALS_DIRECTORY=str(tmp_path))
        assert 'api-key: "0123456789abcdef"' in done.stdout

    @pytest.mark.parametrize("key", ["short", "with a space and more", 'quote"0123456789abcdef', ""])
    def test_a_key_that_would_not_survive_is_refused(self, run, tmp_path, key):
        (tmp_path / "key").write_text(key)
        done, arguments = run("serve", KDTREE_API_KEY_FILE=str(tmp_path / "key"))
        assert done.returncode == 2 and arguments is None

    def test_a_key_that_is_named_but_not_there_is_refused(self, run, tmp_path):
        """Not served without one: also not on the loopback address."""
        done, arguments = run("serve", KDTREE_API_KEY_FILE=str(tmp_path / "none"))
        assert done.returncode == 2 and arguments is None and "cannot read the API key" in done.stderr
        done, arguments = run("serve", CREDENTIALS_DIRECTORY=str(tmp_path))  # of a unit without this credential
        assert done.returncode == 0 and "api-key" not in done.stdout

    @pytest.mark.parametrize(
        ("host", "code"),
        [("0.0.0.0", 2), ("192.168.1.4", 2), ("127.0.0.1.example.com", 2), ("127.0.0.1", 0), ("::1", 0)],
    )
    def test_an_open_address_needs_a_key(self, run, host, code):
        done, arguments = run("serve", KDTREE_HOST=host)
        assert done.returncode == code and (arguments is None) == bool(code)
        assert ("KDTREE_API_KEY_FILE" in done.stderr) == bool(code)

    @pytest.mark.parametrize("flags", [["--host", "0.0.0.0"], ["--hos=0.0.0.0"], ["--api-key", "x"], ["--port=1"]])
    def test_a_flag_does_not_pass_by_the_checks(self, run, flags):
        done, arguments = run("serve", "--tp", "8", *flags)
        assert done.returncode == 2 and arguments is None and "KDTREE_HOST" in done.stderr

    def test_the_operators_verbs(self, run):
        assert run("doctor", "--json")[1] == ["-m", "sglang.kdtree", "doctor", "--json"]
        assert run("probe", "gpu")[1] == ["-m", "sglang.kdtree", "probe", "gpu"]

    def test_health_asks_the_port(self, run):
        assert run("health", KDTREE_PORT="31234")[1][-1] == "http://127.0.0.1:31234/health"

    def test_health_against_a_real_listener(self, scripted):
        scripted.pages["/health"] = (200, "")
        port = scripted.url.rsplit(":", 1)[1]
        for path, code in (("/health", 0), ("/other", 1)):
            scripted.pages = {path: (200, "")}
            done = subprocess.run(
                [ENTRY, "health"],
                env={"PATH": os.environ["PATH"], "KDTREE_PYTHON": sys.executable, "KDTREE_PORT": port},
                capture_output=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == code

    def test_unknown_commands_and_missing_recipes(self, run):
        assert run("dance")[0].returncode == 2
        done, arguments = run("serve", KDTREE_RECIPE="/nowhere.yaml")
        assert done.returncode == 2 and "/nowhere.yaml" in done.stderr and arguments is None

    def test_shellcheck(self):
        done = subprocess.run([tool("shellcheck"), ENTRY], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def check():
    """docker/check.py, which runs the image's commands."""
    spec = importlib.util.spec_from_file_location("image_check", DOCKER / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instructions():
    return check().instructions((DOCKER / "Dockerfile").read_text())


class TestDockerfile:
    def test_hadolint(self):
        done = subprocess.run([tool("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    def test_rules_of_ours(self):
        lines = instructions()
        verbs = [verb for verb, _ in lines]
        base = next(rest for verb, rest in lines if verb == "ARG")
        assert re.fullmatch(r"BASE_IMAGE=nvidia/cuda(:\d+\.\d+\.\d+-runtime-ubuntu24\.04|@sha256:[0-9a-f]{64})", base)
        last_user = [rest for verb, rest in lines if verb == "USER"][-1]
        assert last_user.isdigit() and int(last_user) >= 1000
        assert verbs.index("USER") < verbs.index("ENTRYPOINT")
        assert {"HEALTHCHECK", "ENTRYPOINT", "EXPOSE"} <= set(verbs)
        assert not any("curl" in rest or "wget" in rest or " latest" in rest for _, rest in lines)
        for verb, rest in lines:
            if verb == "RUN" and "apt-get install" in rest:
                assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest

    def test_every_command_is_run_by_the_check_or_needs_root(self, tmp_path, monkeypatch):
        """docker/check.py runs for minutes, over the network; here only that it leaves nothing else out."""
        tool, runs = check(), [rest for verb, rest in instructions() if verb == "RUN"]
        joined = " && ".join(tool.steps())
        assert joined == re.sub(r"\s+", " ", " && ".join(runs)).strip() and ";" not in joined and "|" not in joined
        monkeypatch.setattr(tool, "layers", lambda: False)
        left_out = [step for step in tool.steps() if tool.adapted(step, tmp_path, full=True, stage=0) is None]
        assert {step.split()[0] for step in left_out} <= {"apt-get", "rm", "useradd"}
        moved = [tool.adapted(step, tmp_path, full=True, stage=0) or "" for step in tool.steps()]
        assert not any("/opt/kdtree" in step for step in moved)
        assert any("SGL_KERNEL_SM120_CUDA=1" in step and "--dry-run" not in step for step in moved)

    def test_as_root_nothing_is_left_out(self, tmp_path, monkeypatch):
        tool = check()
        monkeypatch.setattr(tool, "layers", lambda: True)
        assert all(tool.adapted(step, tmp_path, full=True, stage=0) for step in tool.steps())
        stages = [tool.stage_of(number) for number, step in enumerate(tool.steps()) if step == "apt-get update"]
        assert stages == [0, 1] and tool.stage_of(len(tool.steps())) == 1

    def test_what_changes_the_system_runs_in_a_layer_that_the_machine_does_not_see(self, tmp_path):
        """All but apt's, which go over the network: the lists are emptied, the user made, the image entered as it."""
        tool = check()
        if not tool.layers():
            pytest.skip("no root, or no overlayfs here")
        (tmp_path / "src").mkdir()
        lists = set(Path("/var/lib/apt/lists").iterdir())
        remove, add = (next(s for s in tool.steps() if s.startswith(word)) for word in ("rm ", "useradd "))
        for step in (remove, add, tool.AS_USER + tool.user_step()):
            assert tool.run(step, tmp_path, full=False, stage=1), step
        home = tmp_path / "stage1" / "upper" / "home" / "kdtree"
        assert (home / "written").stat().st_uid == home.stat().st_uid == 10001
        assert not Path("/home/kdtree").exists() and "kdtree" not in Path("/etc/passwd").read_text()
        assert set(Path("/var/lib/apt/lists").iterdir()) == lists
        assert tool.run("rm -rf /var/lib/apt/none && ! ls -d /var/lib/apt/lists/*", tmp_path, full=False, stage=1)
        assert not tool.run("useradd --uid 10001 again", tmp_path, full=False, stage=1)  # it stays in the layer

    def test_the_recorded_run_of_the_system_left_nothing_out(self):
        """On a bare system, where apt had everything to install."""
        record = json.loads((ROOT / "docs" / "image-check-system.json").read_text())
        tool = check()
        commands = [step for step in tool.steps() if step.startswith(tool.SYSTEM)] + [tool.AS_USER + tool.user_step()]
        assert record["what"] == "docker/check.py --system --root FOLDER"
        assert [step["command"] for step in record["steps"]] == commands
        assert not any(step["exit"] or step.get("left_out") for step in record["steps"])

    def test_the_check_runs_commands_and_tells_a_failure(self, tmp_path, capsys):
        tool = check()
        tool.copy_sources(tmp_path / "src")
        assert (tmp_path / "src" / "python" / "UPSTREAM.toml").exists()
        assert not list((tmp_path / "src").rglob("*.so")) and not list((tmp_path / "src").rglob("__pycache__"))
        assert tool.run("test -d sgl-kernel-sm120 && test ! -e docker", tmp_path, full=False)
        assert not tool.run("ls /opt/kdtree/none", tmp_path, full=False)
        assert str(tmp_path / "kdtree" / "none") in capsys.readouterr().out

    @pytest.fixture
    def small_check(self, tmp_path, monkeypatch):
        """The check with an image of three commands; -> (run it, the commands that ran this time)."""
        tool, ran = check(), []
        (tmp_path / "root" / "python").mkdir(parents=True)
        (tmp_path / "root" / "python" / "a.py").write_text("")
        copied = tmp_path / "root"
        commands = ["useradd someone", "mkdir /opt/kdtree", "touch /opt/kdtree/a"]

        def copy(target):
            shutil.copytree(copied, target)

        def call(*arguments):
            before = len(ran)
            monkeypatch.setattr(sys, "argv", ["check.py", "--python", sys.executable, *map(str, arguments)])
            return tool.main(), ran[before:]

        real = tool.run
        monkeypatch.setattr(tool, "layers", lambda: False)
        monkeypatch.setattr(tool, "steps", lambda: commands)
        monkeypatch.setattr(tool, "copy_sources", copy)
        monkeypatch.setattr(tool, "run", lambda step, *args, **named: ran.append(step) or real(step, *args, **named))
        call.commands, call.copied, call.tool = commands, copied, tool
        return call

    def test_a_run_of_the_check_is_recorded(self, small_check, tmp_path):
        record = tmp_path / "record.json"
        code, ran = small_check("--json", record, "--keep", tmp_path / "kept")
        assert code == 0 and ran == small_check.commands
        document = json.loads(record.read_text())
        assert [step["command"] for step in document["steps"]] == small_check.commands
        assert document["steps"][0] == {"command": "useradd someone", "left_out": True, "exit": 0}
        assert document["environment_bytes"] >= 0 and str(tmp_path) not in record.read_text()

    def test_what_ended_well_is_not_done_again(self, small_check, tmp_path):
        kept = tmp_path / "kept"
        assert small_check("--keep", kept) == (0, small_check.commands)
        assert small_check("--keep", kept) == (0, [])
        (small_check.copied / "python" / "a.py").write_text("changed")
        assert small_check("--keep", kept) == (0, small_check.commands)

    def test_a_stopped_installation_begins_anew_with_its_compiled_kernels(self, small_check, tmp_path, monkeypatch):
        kept, run = tmp_path / "kept", small_check.tool.run

        def stopped(step, *args, **named):
            if "touch" in step:
                (kept / "src" / "compiled.o").write_text("")
                raise KeyboardInterrupt
            return run(step, *args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(small_check.tool, "run", stopped)
            with pytest.raises(KeyboardInterrupt):
                small_check("--keep", kept)
        assert small_check("--keep", kept) == (0, small_check.commands)  # mkdir would fail, were the folder still there
        assert (kept / "src" / "compiled.o").exists()

    def test_the_first_failure_ends_the_check(self, small_check, tmp_path, capsys):
        small_check.commands[1] = "false"
        assert small_check() == (1, small_check.commands[:2])
        assert "check: 1 of 2 commands failed, 1 not run" in capsys.readouterr().out

    def test_a_python_that_does_not_start_is_none(self, tmp_path):
        """A stand-in of a version manager's for a version that is not chosen, for one."""
        tool, stand_in = check(), tmp_path / "python9"
        stand_in.write_text("#!/bin/sh\nexit 127\n")
        stand_in.chmod(0o755)
        assert tool.interpreter(sys.executable) == sys.executable
        for name in (str(stand_in), "python-of-nowhere"):
            with pytest.raises(SystemExit, match=f"no {name} here that starts"):
                tool.interpreter(name)

    def test_too_little_room_is_said_at_once(self, small_check, monkeypatch):
        monkeypatch.setattr(small_check.tool.preflight, "free_bytes", lambda place: 1e9)
        with pytest.raises(SystemExit, match="1.0 GB are free for .*about 20.0 GB: make room, or .* --keep FOLDER"):
            small_check("--full")

    def test_the_recorded_run_is_full_and_ended_well(self):
        record = json.loads((ROOT / "docs" / "image-check.json").read_text())
        assert record["what"] == "docker/check.py --full" and all(step["exit"] == 0 for step in record["steps"])
        assert record["steps"][-1]["command"].endswith("entry.sh doctor")

    def test_what_it_copies_exists_and_is_in_the_context(self):
        allowed = {
            line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")
        }
        for verb, rest in instructions():
            if verb == "COPY" and not rest.startswith("--from"):
                source = rest.split()[0]
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in allowed

    def test_the_venv_is_looked_for_where_the_base_has_its_python(self):
        """Ubuntu 24.04 has Python 3.12: the path of the CUDA compiler depends on it, and the fork must have a wheel."""
        text = (DOCKER / "Dockerfile").read_text()
        assert "ubuntu24.04" in text and set(re.findall(r"python3\.(\d+)", text)) == {"12"}
        assert "cp312-cp312" in (ROOT / "python" / "UPSTREAM.toml").read_text()

    def test_the_extras_it_installs_exist(self):
        import tomllib

        extras = tomllib.loads((ROOT / "python" / "REQUIREMENTS.toml").read_text())["extras"]
        wanted = re.search(r"\./python\[([a-z,]+)\]", (DOCKER / "Dockerfile").read_text())[1].split(",")
        assert set(wanted) <= set(extras) | {"cuda"}


def interpolate(text, values):
    """${NAME}, ${NAME:-default} and ${NAME:?message}, as compose reads them."""

    def replace(match):
        name, operator, rest = match.groups()
        if name in values:
            return values[name]
        assert operator != "?", f"{name} is required: {rest}"
        return rest or ""

    return re.sub(r"\$\{([A-Z_]+)(?::([-?])([^}]*))?\}", replace, text)


NEEDED = {"MODEL_DIR": "/data/m", "DRAFT_DIR": "/data/d", "API_KEY_FILE": "./key", "GRAFANA_PASSWORD": "secret"}


DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"}
# What Prometheus 3 accepts of the keys used here; it refuses any other key, as promtool does.
PROMETHEUS = {
    "type": "object",
    "required": ["scrape_configs"],
    "additionalProperties": False,
    "properties": {
        "global": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"scrape_interval": DURATION, "scrape_timeout": DURATION, "evaluation_interval": DURATION},
        },
        "scrape_configs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["job_name", "static_configs"],
                "additionalProperties": False,
                "properties": {
                    "job_name": {"type": "string", "minLength": 1},
                    "metrics_path": {"type": "string", "pattern": "^/"},
                    "static_configs": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "targets": {"type": "array", "items": {"type": "string", "pattern": "^[^/]+:[0-9]+$"}},
                                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                            },
                        },
                    },
                },
            },
        },
    },
}


class TestCompose:
    @pytest.fixture
    def compose(self):
        return yaml.safe_load(interpolate((DOCKER / "compose.yaml").read_text(), NEEDED))

    def test_the_specification_accepts_it(self):
        import compose_spec

        text = interpolate((DOCKER / "compose.yaml").read_text(), NEEDED)
        parsed = compose_spec.PyCompose.from_yaml(text)
        assert sorted(parsed.service_names()) == ["grafana", "prometheus", "server"]
        parsed.validate()
        with pytest.raises(ValueError):
            compose_spec.PyCompose.from_yaml(text.replace("restart: unless-stopped", "restart: sometimes"))

    @pytest.mark.parametrize("name", sorted(NEEDED))
    def test_what_must_be_given_is_asked_for(self, name):
        with pytest.raises(AssertionError, match=f"{name} is required"):
            interpolate((DOCKER / "compose.yaml").read_text(), {k: v for k, v in NEEDED.items() if k != name})

    def test_nothing_is_open_to_the_network(self, compose):
        for name, service in compose["services"].items():
            assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
            assert service["cap_drop"] == ["ALL"]
            assert "no-new-privileges:true" in service["security_opt"]
            assert "network_mode" not in service and "privileged" not in service

    def test_images_have_full_tags(self, compose):
        for name, service in compose["services"].items():
            if name != "server":
                assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])

    def test_the_model_is_mounted_where_the_recipe_looks(self, compose):
        volumes = dict(volume.split(":")[:2] for volume in compose["services"]["server"]["volumes"])
        assert volumes["/data/m"] == RECIPE["model-path"]
        assert volumes["/data/d"] == RECIPE["speculative-draft-model-path"]
        assert all(":ro" in v for v in compose["services"]["server"]["volumes"] if v.startswith("/data"))

    def test_gpus_and_rollback(self, compose):
        server = compose["services"]["server"]
        assert server["deploy"]["resources"]["reservations"]["devices"][0]["count"] == RECIPE["tp-size"]
        assert server["command"] == ["serve", "--kdtree-verify", "on"]
        back = yaml.safe_load(interpolate((DOCKER / "compose.yaml").read_text(), NEEDED | {"KDTREE_VERIFY": "off"}))
        assert back["services"]["server"]["command"][-1] == "off"

    def test_every_mounted_file_is_there(self, compose):
        for service in compose["services"].values():
            for volume in service["volumes"]:
                if volume.startswith("./"):
                    assert (DOCKER / volume.split(":")[0]).exists()

    def test_the_key_reaches_the_entry_script(self, compose):
        server = compose["services"]["server"]
        assert server["environment"]["KDTREE_API_KEY_FILE"] == f"/run/secrets/{server['secrets'][0]}"
        assert server["secrets"][0] in compose["secrets"]

    def test_prometheus_scrapes_the_server(self, compose):
        config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
        jsonschema.validate(config, PROMETHEUS)
        host, port = config["scrape_configs"][0]["static_configs"][0]["targets"][0].split(":")
        assert host in compose["services"] and f":{port}" in compose["services"]["server"]["ports"][0]
        assert RECIPE["enable-metrics"] is True


class TestUnit:
    def test_systemd_accepts_it(self, tmp_path):
        text = (DOCKER / "sglang-kdtree.service").read_text().replace("/opt/kdtree/entry.sh", str(ENTRY))
        unit = tmp_path / "sglang-kdtree.service"
        unit.write_text("\n".join(line for line in text.split("\n") if not line.startswith("#   install")))
        analyze = shutil.which("systemd-analyze")  # no package of pip's
        if not analyze:
            pytest.skip("no systemd here")
        done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_it_serves_the_same_recipe_by_the_same_script(self):
        text = (DOCKER / "sglang-kdtree.service").read_text()
        assert "ExecStart=/opt/kdtree/entry.sh serve $KDTREE_FLAGS" in text
        assert "docker/kimi-k2.6.yaml /etc/kdtree/recipe.yaml" in text
        assert "Environment=KDTREE_RECIPE=/etc/kdtree/recipe.yaml" in text
        assert "--mem-fraction" not in text and "--tp" not in text  # no second copy of a flag
        assert "LoadCredential=api-key:" in text and "KDTREE_HOST=127.0.0.1" in text


DASHBOARD = DOCKER / "grafana" / "dashboards" / "kdtree.json"


def queries():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def metric_names():
    return sorted({name for _, query in queries() for name in re.findall(r"sglang:[a-z0-9_]+", query)})


@pytest.fixture(scope="module")
def exported():
    """Every name that upstream's or the fork's sources give to a metric."""
    import sglang.srt

    roots = [*map(Path, sglang.srt.__path__), ROOT / "python" / "sglang" / "srt"]
    names = set()
    for root in roots:
        for path in root.rglob("*.py"):
            names.update(re.findall(r'["\'](sglang:[a-z0-9_]+)["\']', path.read_text(errors="replace")))
    return names


class TestDashboard:
    def test_grafanas_model_reads_all_of_it(self):
        from grafana_foundation_sdk.models import dashboard as models

        raw = json.loads(DASHBOARD.read_text())
        dashboard = models.Dashboard.from_json(raw)
        assert dashboard.title == raw["title"] and len(dashboard.panels) == len(raw["panels"])

    @pytest.mark.parametrize("name", metric_names())
    def test_every_metric_is_exported_by_the_server(self, name, exported):
        assert {name, re.sub(r"_(bucket|sum|count)$", "", name)} & exported

    def test_every_query_is_promql(self):
        import promql_parser

        for _, query in queries():
            promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$model", ".*"))
        with pytest.raises(ValueError):
            promql_parser.parse("rate(x[")

    def test_what_the_operator_wants_to_see_is_there(self):
        titles = " ".join(title for title, _ in queries()).lower()
        for topic in ("accept length", "decode speed against context", "tree", "defragmentation", "validate"):
            assert topic in titles

    def test_layout(self):
        panels = json.loads(DASHBOARD.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = set()
        for panel in panels:
            grid = panel["gridPos"]
            own = {
                (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
            }
            assert grid["x"] + grid["w"] <= 24 and not own & cells
            cells |= own
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])

    def test_its_data_source_is_the_provisioned_one(self):
        provisioning = DOCKER / "grafana" / "provisioning"
        source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
        used = set(re.findall(r'"uid": "([a-z]+)"\s*\}', DASHBOARD.read_text()))
        assert used == {source["uid"]}
        provider = yaml.safe_load((provisioning / "dashboards" / "kdtree.yaml").read_text())["providers"][0]
        compose = yaml.safe_load(interpolate((DOCKER / "compose.yaml").read_text(), NEEDED))
        mounts = compose["services"]["grafana"]["volumes"]
        assert any(mount.split(":")[1] == provider["options"]["path"] for mount in mounts)
