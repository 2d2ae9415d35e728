fn main() -> std::io::Result<()> {
    // `meshserve protos protos` writes them. Needs protoc on the PATH.
    tonic_build::configure().build_server(false).compile_protos(&["protos/meshserve/v1/inference.proto"], &["protos"])
}
