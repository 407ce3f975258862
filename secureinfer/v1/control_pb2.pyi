from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "session_id", "manifest_digest", "backend", "protocol", "model_owner", "data_owners", "dealer", "unsafe")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_OWNER_FIELD_NUMBER: _ClassVar[int]
    DATA_OWNERS_FIELD_NUMBER: _ClassVar[int]
    DEALER_FIELD_NUMBER: _ClassVar[int]
    UNSAFE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session_id: bytes
    manifest_digest: str
    backend: str
    protocol: str
    model_owner: str
    data_owners: _containers.RepeatedScalarFieldContainer[str]
    dealer: str
    unsafe: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., session_id: _Optional[bytes] = ..., manifest_digest: _Optional[str] = ..., backend: _Optional[str] = ..., protocol: _Optional[str] = ..., model_owner: _Optional[str] = ..., data_owners: _Optional[_Iterable[str]] = ..., dealer: _Optional[str] = ..., unsafe: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class JoinSessionRequest(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("port", "token", "data_link")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_LINK_FIELD_NUMBER: _ClassVar[int]
    port: int
    token: bytes
    data_link: str
    def __init__(self, port: _Optional[int] = ..., token: _Optional[bytes] = ..., data_link: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
