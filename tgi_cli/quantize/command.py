"""Runs ``tgi quantize``: fetches the model, quantizes or inspects it, reports, uploads."""

from __future__ import annotations

from pathlib import Path

from tgi_cli.errors import ConfigError, GatedModelError, HubError, OfflineError
from tgi_cli.hub.client import HubEnvironment, transport_errors
from tgi_cli.hub.download import download_progress
from tgi_cli.hub.resolve import resolve_model
from tgi_cli.models.checkpoint_report import describe
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.quantization.algorithms.recipe import Recipe, check_recipe, default_format
from tgi_cli.quantize import gptqmodel, pipeline
from tgi_cli.quantize.gguf_output import check_options, output_path, quantize_to_gguf
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.pipeline import QuantizeJob
from tgi_cli.quantize.report import show_inspection, show_result


def run(options: QuantizeOptions, command_line: str) -> None:
    """Do what the options ask for, and print the result to stdout.

    Args:
        command_line: the command as typed, for the model card.

    Raises:
        ConfigError, HubError, ModelError: as :func:`tgi_cli.quantize.pipeline.quantize` and
            :func:`upload` raise them.
    """
    if options.inspect:
        if options.output_dir is not None:
            raise ConfigError("--inspect writes nothing", f"leave out {options.output_dir}")
        report = describe(_fetch_model(options), options.device)
        show_inspection(options.model_id, report, options.json_output)
        return
    if options.output_dir is None:
        raise ConfigError("OUTPUT_DIR is missing", "tgi quantize MODEL_ID OUTPUT_DIR")
    if options.upload_to_model_id is not None:
        check_upload(options.upload_to_model_id)
    if options.format == "gguf":
        _write_gguf(options)
        return
    recipe = recipe_from(options)
    check_recipe(recipe)
    job = QuantizeJob(
        _fetch_model(options), options.output_dir, recipe, options, command_line=command_line
    )
    if options.backend == "gptqmodel":
        result = gptqmodel.quantize(job)
    else:
        progress = ProgressReporter(
            "blocks",
            show_bar=False if options.json_output else None,
            log_interval=30.0,
            transient=True,
        )
        result = pipeline.quantize(job, progress)
    url = None
    if options.upload_to_model_id is not None:
        url = upload(options.output_dir, options.upload_to_model_id)
    show_result(result, options.json_output, url)


def recipe_from(options: QuantizeOptions) -> Recipe:
    """The recipe, with the method's defaults for unset options."""
    method = options.method or "gptq"
    bytewise = method in ("fp8", "int8")
    sym = method != "awq" if options.sym is None else options.sym
    group_size, group_aware = options.group_size, options.group_aware
    if group_size is None:
        group_size = -1 if bytewise else 128
    if group_aware is None:
        group_aware = method == "gptq" and not options.act_order
    return Recipe(
        method=method,
        bits=options.bits or (8 if bytewise else 4),
        group_size=group_size,
        sym=sym,
        desc_act=options.act_order,
        static_groups=options.static_groups,
        group_aware=group_aware,
        mse=options.mse,
        percdamp=options.percdamp,
        format=options.format or default_format(method, sym),
    )


def _write_gguf(options: QuantizeOptions) -> None:
    output_path(options, check_options(options))
    progress = ProgressReporter(
        "tensors",
        show_bar=False if options.json_output else None,
        log_interval=30.0,
        transient=True,
    )
    result = quantize_to_gguf(_fetch_model(options), options, progress)
    url = None
    if options.upload_to_model_id is not None:
        url = upload(result.path, options.upload_to_model_id)
    show_result(result, options.json_output, url)


def _fetch_model(options: QuantizeOptions) -> Path:
    return resolve_model(
        options.model_id,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        progress=download_progress(json_output=options.json_output),
    ).path


def check_upload(model_id: str) -> None:
    """Raise the errors of :func:`upload` that are known before anything is quantized.

    Raises:
        ConfigError: ``model_id`` is not a valid repository name.
        HubError: no token is set, or the hub is disabled.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    environment = HubEnvironment.read()
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise ConfigError(f"--upload-to-model-id {model_id!r} is not a valid model id") from error
    if environment.offline:
        raise OfflineError("--upload-to-model-id: HF_HUB_OFFLINE is set", "unset one of them")
    if environment.token is None:
        raise GatedModelError(f"uploading to {model_id} requires a token", "set HF_TOKEN")


def upload(folder: Path, model_id: str) -> str:
    """Upload a file or folder to the repository ``model_id``, which is created if necessary.

    Returns its URL.

    Raises:
        ConfigError: ``model_id`` is not a valid repository name.
        HubError: no token is set, or the hub refuses or cannot be reached. The folder remains.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_upload(model_id)
    environment = HubEnvironment.read()
    remedy = f"{folder} is complete: `hf upload {model_id} {folder}` tries again"
    connection_errors: tuple[type[Exception], ...] = (*transport_errors(), OSError)
    api = HfApi(endpoint=environment.endpoint, token=environment.token)
    try:
        url = api.create_repo(model_id, exist_ok=True)
        message = "Upload a quantized checkpoint"
        if folder.is_file():
            api.upload_file(
                path_or_fileobj=folder,
                path_in_repo=folder.name,
                repo_id=model_id,
                commit_message=message,
            )
        else:
            api.upload_folder(repo_id=model_id, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        raise HubError(f"{environment.endpoint} refuses {model_id}: {error}", remedy) from error
    except connection_errors as error:
        raise OfflineError(
            f"{environment.endpoint} cannot be reached ({type(error).__name__})", remedy
        ) from error
    return str(url)
