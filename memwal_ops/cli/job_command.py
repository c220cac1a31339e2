"""Make a click command for each registered job from its specs: ``memwal-ops merge URI`` and the others.

A command shows the union of the job's options in all formats. Which of them apply to the table at URI is known once
it is open; an option that does not apply is refused (exit code 2), and so is a job that does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import click
from click.core import ParameterSource

from memwal_ops import errors
from memwal_ops.cli import printing
from memwal_ops.cli.options import TABLE, branch_parameter, json_parameter, on, storage_parameters
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import Option, OptionError, Options, ValueType, describe
from memwal_ops.core.protocols import Table

_METAVARS = {
    ValueType.SIZE: "SIZE",
    ValueType.DURATION: "DURATION",
    ValueType.COUNT: "N",
    ValueType.NUMBER: "X",
    ValueType.PART: "ID",
}


ALL_BRANCHES = "all"
_OF_ALL_BRANCHES = frozenset({"maintain", "verify"})
_OF_SEVERAL = frozenset({"maintain"})
_ALONE = "--from FILE takes the place of URI, --namespace, --branch and --storage-option: give it alone."


class HasOptions(Protocol):
    """What a command line is made of: a job, or the preparation of a table."""

    @property
    def name(self) -> str:
        """The command."""

    @property
    def options(self) -> type[Options]:
        """Its options."""


def job_command(name: str, specs: Mapping[str, JobSpec]) -> click.Command:
    """Return the command of a job.

    ``specs``: the job's spec in each format that has it; ``--help`` is that of the first one, ``--help-for`` of each.
    """
    first = next(iter(specs.values()))

    @click.pass_context
    def run(
        context: click.Context,
        /,
        uri: str | tuple[str, ...] | None,
        namespace: str | None,
        storage_options: dict[str, str],
        as_json: bool,
        branch: str | None = None,
        export_file: str | None = None,
        database: str | None = None,
        **given: Any,
    ) -> int:
        chosen = chosen_options(context, given)
        if isinstance(uri, tuple):
            if len(uri) != 1 or database is not None:
                tables = _tables(uri, database, namespace, storage_options)
                places = _places(tables, storage_options, branch)
                return _on_each(
                    first.name, "tables", places, storage_options, chosen, database=database, as_json=as_json
                )
            [uri] = uri
        if export_file is not None:
            if uri is not None or namespace is not None or branch is not None or storage_options:
                raise errors.InvalidUsageError(_ALONE)
            from memwal_ops.core.export import open_export  # noqa: PLC0415 - the clients of stores: not for --help

            with open_export(export_file, first.name) as table:
                return _printed(*_ran(first.name, table, None, chosen, as_json=as_json), as_json=as_json)
        if uri is None and first.uri_from is not None and (file := chosen.get(first.uri_from)) is not None:
            from memwal_ops.core.certificate import uri_of  # noqa: PLC0415 - one command needs it

            uri = uri_of(file)
        place = _named(uri, namespace, storage_options)
        if branch == ALL_BRANCHES and first.name in _OF_ALL_BRANCHES:
            branches = _branch_uris(place, storage_options)
            return _on_each(first.name, "branches", branches, storage_options, chosen, as_json=as_json)
        place = on(place, branch, storage_options)
        return _printed(*_ran(first.name, place, storage_options, chosen, as_json=as_json), as_json=as_json)

    from_export = any(spec.from_export for spec in specs.values())
    parameters = _place_parameters(name, optional=from_export or first.uri_from is not None)
    parameters += option_parameters(specs)
    if from_export:
        about = "Read the table from a file of export-support, instead of URI."
        parameters.append(click.Option(["--from", "export_file"], metavar="FILE", help=about))
    if any(spec.deletes for spec in specs.values()):
        parameters.append(click.Option(["--apply"], is_flag=True, help="Do it. Without it, nothing is changed."))
    elif not first.reads_only:
        parameters.append(click.Option(["--dry-run"], is_flag=True, help="Show what it would do and change nothing."))
    command = _JobCommand(
        name, callback=run, params=parameters, help=first.help or first.summary, short_help=first.summary
    )
    about = "The catalog in which URI is the name of a table."
    command.params.append(click.Option(["--namespace"], metavar="CATALOG", help=about))
    command.params += [branch_parameter(every=first.name in _OF_ALL_BRANCHES), *storage_parameters(), json_parameter()]
    if len({spec.help for spec in specs.values()}) > 1:
        command.params.append(_help_for(name, specs))
    return command


def _place_parameters(name: str, *, optional: bool) -> list[click.Parameter]:
    if name not in _OF_SEVERAL:
        return [click.Argument(["uri"], type=TABLE, required=not optional)]
    about = "All tables of this LanceDB folder, those of its namespaces, too."
    return [
        click.Argument(["uri"], type=TABLE, metavar="[URI]...", nargs=-1),
        click.Option(["--database"], type=TABLE, metavar="DIR", help=about),
    ]


class _JobCommand(click.Command):
    """A command that knows options whose value may be left out; click would take the next argument for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with the values that were left out."""
        known = {flag: param for param in self.params if isinstance(param.type, _Value) for flag in param.opts}
        end = args.index("--") if "--" in args else len(args)
        spelled = []
        for argument, following in zip(args[:end], [*args[1:end], ""], strict=False):  # of none, no pair
            parameter = known.get(argument)
            option = parameter.type.option if parameter is not None and isinstance(parameter.type, _Value) else None
            left_out = option is not None and option.bare is not None and following not in option.choices
            spelled.append(f"{argument}={option.bare}" if option is not None and left_out else argument)
        return super().parse_args(ctx, [*spelled, *args[end:]])


def _help_for(name: str, specs: Mapping[str, JobSpec]) -> click.Option:
    """The option that shows the help for tables of one format, with its options alone."""

    def show(context: click.Context, _: click.Parameter, wanted: str | None) -> None:
        if wanted is not None:
            printing.echo(job_command(name, {wanted: specs[wanted]}).get_help(context))
            context.exit()

    return click.Option(
        ["--help-for"],
        type=click.Choice(list(specs)),
        is_eager=True,
        expose_value=False,
        callback=show,
        metavar="FORMAT",
        help=f"Show the help of one format: {', '.join(specs)}.",
    )


def option_parameters(specs: Mapping[str, HasOptions]) -> list[click.Parameter]:
    """The parameters of a command: the options of all formats."""
    return [_parameter(formats, specs) for formats in _union(specs).values()]


def chosen_options(context: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given on the command line; defaults are not."""
    return {
        key: value
        for key, value in given.items()
        if context.get_parameter_source(key) not in {ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None}
    }


def _named(uri: str | None, namespace: str | None, storage: Mapping[str, str]) -> str:
    if uri is None:
        raise errors.InvalidUsageError("Missing argument 'URI'.", remedy="Give the table's URI, or --from FILE.")
    if namespace is None:
        return uri
    from memwal_ops.storage.catalogs import Catalog  # noqa: PLC0415 - few commands need it

    return Catalog.from_uri(namespace, storage).uri(*uri.split("/"))


def _tables(uris: tuple[str, ...], database: str | None, namespace: str | None, storage: dict[str, str]) -> list[str]:
    """The URIs of several tables: those given, or those of a LanceDB folder."""
    if bool(uris) == (database is not None) or (database is not None and namespace is not None):
        raise errors.InvalidUsageError("Give URIs of tables, or --database DIR.")
    if database is None:
        return [_named(uri, namespace, storage) for uri in dict.fromkeys(uris)]
    from memwal_ops.core.maintain import tables_of_database  # noqa: PLC0415 - the clients of stores: not for --help

    tables, _ = tables_of_database(database, storage)
    return tables


def _places(tables: list[str], storage: dict[str, str], branch: str | None) -> dict[str, str]:
    """The URIs to run on, by the name that each is shown by: of each table, or of each branch of them."""
    if branch != ALL_BRANCHES:
        return {table: on(table, branch, storage) for table in tables}
    places: dict[str, str] = {}
    for table in tables:
        with suppress(errors.MemwalOpsError):  # the run on the table itself tells why it cannot be read
            places |= {uri: uri for uri in _branch_uris(table, storage).values()}
        places.setdefault(table, table)
    return places


def _branch_uris(uri: str, storage: dict[str, str]) -> dict[str, str]:
    from memwal_ops.core.registry import MAIN, branches  # noqa: PLC0415 - not for --help
    from memwal_ops.storage.catalogs import branch_uri  # noqa: PLC0415 - not for --help

    return {MAIN: uri} | {branch.name: branch_uri(uri, branch.name) for branch in branches(uri, storage)}


def _on_each(
    job: str,
    what: str,
    places: Mapping[str, str],
    storage: dict[str, str],
    chosen: Mapping[str, Any],
    *,
    database: str | None = None,
    as_json: bool,
) -> int:
    """Run a job at each place; an error at one does not stop the others. Returns the worst exit code.

    ``database``: the LanceDB folder that was listed: what an interrupted drop or creation left there is no table.

    Raises:
        TableNotFoundError: there is no table.
    """
    documents: dict[str, Any] = {}
    codes: list[int] = []
    for name, place in places.items():
        try:
            output, code = _ran(job, place, storage, chosen, as_json=as_json)
        except errors.MemwalOpsError as error:
            is_none = isinstance(error, errors.NotALanceTableError | errors.TableNotFoundError)
            if database is not None and is_none and _is_stub(place, storage):
                continue
            output = printing.error_document(error) if as_json else f"Error ({error.reason}): {error}\n  {error.remedy}"
            code = error.exit_code
        if not as_json:
            printing.echo(printing.with_pages(f"{chr(10) if codes else ''}{name}\n{output}"))
        documents[name] = output
        codes.append(code)
    if not documents:
        raise errors.TableNotFoundError(f"No table found in {database}: it has no folder NAME.lance.")
    if as_json:
        printing.echo_json({what: documents})
    return errors.worst_exit_code(codes)


def _is_stub(uri: str, storage: dict[str, str]) -> bool:
    from memwal_ops.core.maintain import skipped_stub  # noqa: PLC0415 - the clients of stores: not for --help

    try:
        return skipped_stub(uri, storage) is not None
    except errors.MemwalOpsError:
        return False


def _printed(output: Any, code: int, *, as_json: bool) -> int:
    printing.echo_result(output, str(output), as_json=as_json)
    return code


def _ran(
    job: str, place: str | Table, storage: Mapping[str, str] | None, given: Mapping[str, Any], *, as_json: bool
) -> tuple[Any, int]:
    """Run a job on a table as its command does; return its report as a document or as text, and the exit code."""
    from memwal_ops.allocators import bound_allocators  # noqa: PLC0415 - imports pyarrow: not for --help
    from memwal_ops.cli.ledger import RunHistory, expected  # noqa: PLC0415 - not for --help
    from memwal_ops.cli.progress import running  # noqa: PLC0415 - not for --help
    from memwal_ops.core.run import Run, plugin_errors  # noqa: PLC0415 - not for --help

    bound_allocators()
    history = RunHistory()
    with running(show=sys.stderr.isatty()) as context:
        context.past_runs = history
        run = Run(
            place, job, lambda spec: _choice(spec, given), None, storage, context=context, recorder=history.record
        )
        try:
            report = run.perform()
        except OptionError as error:
            raise _spelled(error, run.spec) from None
    with plugin_errors(run.spec):
        output = report.to_json() if as_json else report.describe()
        checks = run.spec.uri_from is not None and getattr(run.options, run.spec.uri_from) is not None
        if not (run.acts or checks or run.spec.reads_only or run.spec.by_hand):
            output = expected(history, run).added_to(output)
        return output, report.exit_code


def _choice(spec: JobSpec, given: Mapping[str, Any]) -> tuple[Options, bool | None]:
    """The options on the command line, and whether to act: its ``--apply`` or ``--dry-run``, where the job has one."""
    values = dict(given)
    # A job that only reads may have an option dry_run, and maintain has an option apply.
    if spec.deletes:
        apply = values.pop("apply", None)
    else:
        apply = None if spec.reads_only or not values.pop("dry_run", False) else False
    return read_options(spec, values), apply


def read_options(spec: HasOptions, values: Mapping[str, Any]) -> Options:
    """Return the job's options from the values on the command line.

    Raises ``InvalidUsageError``: an option does not apply to this table, or a value is invalid.
    """
    known = {option.name: option for option in describe(spec.options)}
    inner: dict[str, list[Option]] = {}
    for option in known.values():
        for name in option.flat:
            inner.setdefault(name, []).append(option)
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name in known:
            given[name] = value
        elif name in inner:
            for option in inner[name]:  # one option of the command for all groups that have it
                given.setdefault(option.name, {})[name] = value
        else:
            flags = dict.fromkeys(option.flags for option in _flat(spec.options))
            raise errors.InvalidUsageError(
                f"--{name.replace('_', '-')} is an option of {spec.name} that this table does not have.",
                remedy=f"Its options: {', '.join(flags) or 'none'}.",
            )
    try:
        return spec.options.read(given)
    except OptionError as error:
        raise _spelled(error, spec) from None


def _spelled(error: OptionError, spec: HasOptions) -> errors.InvalidUsageError:
    """Return the error with the flags of the command line instead of option names."""
    flags = {option.name: option.flags for option in _flat(spec.options)}
    return error.spelled(lambda name: flags.get(name, f"--{name.replace('_', '-')}"))


def _flat(options: type[Options]) -> Iterator[Option]:
    """Yield the options of the command line: of groups those that are flat."""
    for option in describe(options):
        if option.group is not None:
            yield from (inner for inner in describe(option.group) if inner.name in option.flat)
        elif option.command_line:
            yield option


def _union(specs: Mapping[str, HasOptions]) -> dict[str, dict[str, Option]]:
    options: dict[str, dict[str, Option]] = {}
    for format_name, spec in specs.items():
        for option in _flat(spec.options):
            options.setdefault(option.name, {}).setdefault(format_name, option)
    return options


def _parameter(formats: Mapping[str, Option], specs: Mapping[str, HasOptions]) -> click.Parameter:
    option = next(iter(formats.values()))
    if option.positional:
        return click.Argument([option.name], metavar=option.metavar, required=len(formats) == len(specs))
    about = option.help
    if len(formats) < len(specs):
        about = f"({', '.join(formats)}) {about}"
    if option.kind is ValueType.FLAG:
        return click.Option([option.flags, option.name], is_flag=True, help=about)
    first = option.default_text()
    texts = {name: other.default_text() for name, other in formats.items()}
    others = [f"{name}: {text}" for name, text in texts.items() if text not in {None, first}]
    if first is not None or others:
        about = f"{about}  [default: {'; '.join(filter(None, [first, *others]))}]"
    return click.Option(
        [option.flags, option.name],
        type=_Value(option),
        multiple=option.repeated and option.values is None,
        nargs=option.values or 1,
        metavar=option.metavar,
        help=about,
    )


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """The click type of an option, which reads values by the option's definition."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = _METAVARS.get(option.kind, "TEXT")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return the choices, or a placeholder for the value."""
        del param, ctx
        return f"[{'|'.join(self.option.choices)}]" if self.option.choices else self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value. Raises ``InvalidUsageError``: it is invalid."""
        del param
        try:
            read = self.option.read_one(value)
            self.option.check_one(read)
        except OptionError as error:
            usage_error = error.spelled(lambda _: self.option.flags)
            if ctx is not None and usage_error.remedy == errors.InvalidUsageError.remedy:
                usage_error.remedy = f"See {ctx.command_path} --help."
            raise usage_error from None
        return read
