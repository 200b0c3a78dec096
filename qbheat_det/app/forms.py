# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads the image in an HTML form, which ``curl -F file=@photo.jpg`` sends (RFC 7578).

The server accepts one file and nothing else of a form, so this needs no general parser, which would
be one more requirement of ``qbheat serve``.
"""

import re

_MAX_HEAD = 8192  # bytes before the content of a part
_MAX_PARTS = 20  # a million tiny ones would take a minute
# Python's parser of e-mail headers takes 17 s for a crafted header of 60 KB, and raises errors of
# several types. These expressions take a time that is proportional to the length.
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_QUOTED = re.compile(rb'"[^"]*"')
_FILE_NAME = re.compile(
    rb"^content-disposition:.*;\s*filename(?:\*[0-9*]*)?\s*=",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)


class BadForm(Exception):
    """Raised for a form that is invalid, or does not have exactly one file."""


def is_form(content_type: str) -> bool:
    """Returns whether a request with this header ``Content-Type`` is a form."""
    return content_type.strip().lower().startswith("multipart/form-data")


def read_file(body: bytearray, content_type: str) -> bytearray:
    """Returns the content of the only file in a form. Fields without a file name are skipped.

    Args:
        body: the request body.
        content_type: the header ``Content-Type``, which has the boundary between the parts.

    Raises:
        BadForm: the form is invalid, or it does not have exactly one file.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadForm("the form has no boundary")
    boundary = found[1] or found[2]
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    # The first delimiter lacks the line break if it starts the body.
    start = body.find(delimiter[2:])
    if start < 0:
        raise BadForm("the form lacks its boundary")
    start += len(delimiter) - 2
    files = []
    num_parts = 0
    while not body.startswith(b"--", start):  # which follow the last delimiter
        end = body.find(delimiter, start)
        if end < 0:
            raise BadForm("the form ends early")
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise BadForm(f"the form has more than {_MAX_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", start, min(end, start + _MAX_HEAD))
        if head_end < 0:
            raise BadForm("a part of the form has no header")
        head = _QUOTED.sub(b"", body[start + 2 : head_end])
        if _FILE_NAME.search(head):
            files.append((head_end + 4, end))
        start = end + len(delimiter)
    if len(files) != 1:
        raise BadForm(f"the form has {len(files)} files, expected one")
    content_start, content_end = files[0]
    return body[content_start:content_end]
