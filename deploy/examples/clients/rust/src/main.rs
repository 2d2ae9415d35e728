//! Streams a chat that survives the restart of a replica, cancels one, and shows a refused field.
//!
//!     chat [--ca FILE] [--token-file FILE] [ADDRESS,... [MESSAGE]]
//!
//! tonic has no service config. It balances over addresses, and this program starts again where a replica stops.

use std::{error::Error, fs, io::Write, time::Duration};

use pb::inference_service_client::InferenceServiceClient;
use rand::Rng;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

mod pb {
    tonic::include_proto!("meshserve.v1");
}

const FIRST_DELAY: Duration = Duration::from_millis(50);
const MAX_DELAY: Duration = Duration::from_secs(2);
const MAX_FAILURES: u32 = 20;

struct Chat {
    client: InferenceServiceClient<Channel>,
    authorization: Option<MetadataValue<Ascii>>,
}

impl Chat {
    /// Connects to the replicas at `addresses`, separated by commas.
    fn connect(addresses: &str, ca: Option<&str>, token_file: Option<&str>) -> Result<Self, Box<dyn Error>> {
        let mut endpoints = Vec::new();
        for address in addresses.split(',') {
            let scheme = if ca.is_some() { "https" } else { "http" };
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))?
                .http2_keep_alive_interval(Duration::from_secs(30))
                .connect_timeout(Duration::from_secs(2));
            if let Some(path) = ca {
                let authority = Certificate::from_pem(fs::read(path)?);
                endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(authority))?;
            }
            endpoints.push(endpoint);
        }
        let channel = match endpoints.as_slice() {
            [only] => only.connect_lazy(),
            _ => Channel::balance_list(endpoints.into_iter()),
        };
        let client = InferenceServiceClient::new(channel).max_decoding_message_size(16 << 20);
        let authorization = match token_file {
            Some(path) => Some(format!("Bearer {}", fs::read_to_string(path)?.trim()).parse()?),
            None => None,
        };
        Ok(Self { client, authorization })
    }

    /// Streams one answer until `show` returns false: the stream is then dropped, which cancels the call.
    async fn stream(
        &mut self,
        chat: &pb::ChatRequest,
        mut show: impl FnMut(pb::ChatResponse) -> bool,
    ) -> Result<(), Status> {
        let mut request = Request::new(chat.clone());
        request.set_timeout(Duration::from_secs(600));
        if let Some(value) = &self.authorization {
            request.metadata_mut().insert("authorization", value.clone());
        }
        let mut responses = self.client.chat(request).await?.into_inner();
        while let Some(response) = responses.message().await? {
            if !show(response) {
                break;
            }
        }
        Ok(())
    }

    /// Like `stream`, and starts again wherever the stream is interrupted, on any replica. As tokens depend only on prompt,
    /// seed and position, the same ones come again: those that were shown before are left out. That computes them twice;
    /// the examples in Go and TypeScript resume, which does not.
    async fn stream_again(
        &mut self,
        mut chat: pb::ChatRequest,
        mut show: impl FnMut(pb::ChatResponse) -> bool,
    ) -> Result<(), Status> {
        let sampling = chat.sampling.get_or_insert_with(Default::default);
        sampling.seed.get_or_insert_with(|| rand::thread_rng().gen_range(0..1 << 63));
        let (mut num_tokens, mut num_bytes) = (0, 0); // of what was shown
        let mut failures = 0;
        loop {
            let before = num_tokens;
            let (mut skipped_tokens, mut skipped_bytes) = (num_tokens, num_bytes);
            let result = self
                .stream(&chat, |mut response| {
                    let tokens = skipped_tokens.min(response.token_ids.len());
                    let bytes = skipped_bytes.min(response.text.len());
                    skipped_tokens -= tokens;
                    skipped_bytes -= bytes;
                    response.token_ids.drain(..tokens);
                    response.text.drain(..bytes);
                    num_tokens += response.token_ids.len();
                    num_bytes += response.text.len();
                    let is_new =
                        !response.token_ids.is_empty() || !response.text.is_empty() || response.finish.is_some();
                    !is_new || show(response)
                })
                .await;
            let Err(status) = result else { return Ok(()) };
            if num_tokens > before {
                failures = 0;
            }
            let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
            let is_retried = match status.code() {
                Code::Unavailable | Code::Cancelled | Code::Unknown => true, // Unknown: the connection was lost
                Code::ResourceExhausted => retry.is_some(),
                _ => false,
            };
            if !is_retried || failures >= MAX_FAILURES {
                return Err(status);
            }
            let backoff = (FIRST_DELAY * 2u32.pow(failures.min(10))).min(MAX_DELAY);
            let backoff = backoff.mul_f64(rand::thread_rng().gen_range(0.5..1.0));
            tokio::time::sleep(backoff.max(retry.unwrap_or_default())).await;
            failures += 1;
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut ca, mut token_file, mut rest) = (None, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--ca" => ca = arguments.next(),
            "--token-file" => token_file = arguments.next(),
            _ => rest.push(argument),
        }
    }
    let addresses = rest.first().map_or("127.0.0.1:50051", String::as_str);
    let content = rest.get(1).map_or("Who art thou?", String::as_str);
    let mut chat = Chat::connect(addresses, ca.as_deref(), token_file.as_deref())?;
    let mut request = pb::ChatRequest {
        messages: vec![pb::ChatMessage { role: "user".into(), content: content.into(), ..Default::default() }],
        sampling: Some(pb::SamplingParams { max_tokens: Some(200), ..Default::default() }),
        ..Default::default()
    };

    println!("# A chat. Restart a replica meanwhile: it goes on where it was.");
    chat.stream_again(request.clone(), |response| {
        print!("{}", response.text);
        let _ = std::io::stdout().flush();
        if let Some(finish) = response.finish {
            println!("\n[{}]", finish.reason().as_str_name());
        }
        true
    })
    .await?;

    println!("# Another one, cancelled after its first message: the server frees its pages at once.");
    chat.stream(&request, |response| {
        println!("{}...", response.text);
        false
    })
    .await?;

    println!("# A refused one.");
    request.sampling = Some(pb::SamplingParams { temperature: Some(-1.0), ..Default::default() });
    if let Err(status) = chat.stream(&request, |_| true).await {
        let violations = status.get_details_bad_request().map(|details| details.field_violations).unwrap_or_default();
        let field = violations.first().map_or("", |violation| violation.field.as_str());
        println!("field {field}: {}", status.message());
    }
    Ok(())
}
