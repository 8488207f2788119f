"""`carbonopt schema`: print the JSON schema of study files."""

from carbonopt.cli.exit_codes import check_output


def schema() -> None:
    """Print the JSON schema of study files and pipeline files, for an editor."""
    from carbonopt.study_file.study_schema import schema_text

    check_output()
    print(schema_text(), end="")
