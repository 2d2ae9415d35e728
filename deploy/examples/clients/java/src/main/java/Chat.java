import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.RetryInfo;
import com.meshserve.v1.ChatMessage;
import com.meshserve.v1.ChatRequest;
import com.meshserve.v1.ChatResponse;
import com.meshserve.v1.InferenceServiceGrpc;
import com.meshserve.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import com.meshserve.v1.SamplingParams;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;

/**
 * Streams a chat that survives the restart of a replica, cancels one, and shows a refused field.
 *
 * <p>Chat TARGET [--ca FILE] [--token-file FILE] [MESSAGE]
 */
public final class Chat {
  private static final double FIRST_DELAY_SECONDS = 0.05;
  private static final double MAX_DELAY_SECONDS = 2.0;
  private static final int MAX_FAILURES = 20;

  private final InferenceServiceBlockingStub stub;

  private Chat(InferenceServiceBlockingStub stub) {
    this.stub = stub;
  }

  /** Returns a stub for a server, or for all replicas behind a name such as "dns:///meshserve:50051". */
  static InferenceServiceBlockingStub connect(ManagedChannel channel, String tokenFile) throws Exception {
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    if (tokenFile == null) {
      return stub;
    }
    Metadata headers = new Metadata();
    String token = Files.readString(Path.of(tokenFile)).strip();
    headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  static ManagedChannel channel(String target, String ca) throws Exception {
    ChannelCredentials credentials =
        ca == null
            ? InsecureChannelCredentials.create()
            : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
    @SuppressWarnings("unchecked")
    Map<String, ?> config =
        new Gson().fromJson(Files.readString(Path.of("protos/service_config.json")), Map.class);
    return Grpc.newChannelBuilder(target, credentials)
        .defaultServiceConfig(config)
        .enableRetry()
        .keepAliveTime(30, TimeUnit.SECONDS)
        .maxInboundMessageSize(16 << 20)
        .build();
  }

  /** Streams one answer until `show` returns false, which cancels the call. */
  void stream(ChatRequest request, Predicate<ChatResponse> show) {
    Context.CancellableContext context = Context.current().withCancellation();
    try {
      context.run(
          () -> {
            Iterator<ChatResponse> responses = stub.withDeadlineAfter(10, TimeUnit.MINUTES).chat(request);
            while (responses.hasNext()) {
              if (!show.test(responses.next())) {
                return;
              }
            }
          });
    } finally {
      context.cancel(null); // frees the request's pages at once; no effect on a call that has ended
    }
  }

  /**
   * Like `stream`, and starts again wherever the stream is interrupted, on any replica. As tokens depend only on prompt,
   * seed and position, the same ones come again: those that were shown before are left out. That computes them twice; the
   * examples in Go and TypeScript resume, which does not.
   */
  void streamAgain(ChatRequest request, Predicate<ChatResponse> show) throws InterruptedException {
    if (!request.getSampling().hasSeed()) {
      long seed = ThreadLocalRandom.current().nextLong(Long.MAX_VALUE);
      request = request.toBuilder().setSampling(request.getSampling().toBuilder().setSeed(seed)).build();
    }
    int[] shown = {0, 0}; // tokens, and characters of text
    for (int failures = 0; ; failures++) {
      int before = shown[0];
      int[] skip = shown.clone();
      try {
        stream(request, response -> isWanted(response, shown, skip, show));
        return;
      } catch (StatusRuntimeException error) {
        failures = shown[0] > before ? 0 : failures;
        Double retrySeconds = retrySeconds(error);
        Status.Code code = error.getStatus().getCode();
        boolean isRetried =
            code == Status.Code.UNAVAILABLE
                || code == Status.Code.CANCELLED
                || (code == Status.Code.RESOURCE_EXHAUSTED && retrySeconds != null);
        if (!isRetried || failures >= MAX_FAILURES) {
          throw error;
        }
        double backoff = Math.min(FIRST_DELAY_SECONDS * Math.pow(2, failures), MAX_DELAY_SECONDS);
        backoff *= ThreadLocalRandom.current().nextDouble(0.5, 1.0);
        Thread.sleep((long) (1000 * Math.max(backoff, retrySeconds == null ? 0 : retrySeconds)));
      }
    }
  }

  /** Shows what of a response was not shown before; `shown` and `skip` count tokens and characters. */
  private static boolean isWanted(ChatResponse response, int[] shown, int[] skip, Predicate<ChatResponse> show) {
    int tokens = Math.min(skip[0], response.getTokenIdsCount());
    int characters = Math.min(skip[1], response.getText().length());
    skip[0] -= tokens;
    skip[1] -= characters;
    ChatResponse fresh =
        response.toBuilder()
            .clearTokenIds()
            .addAllTokenIds(response.getTokenIdsList().subList(tokens, response.getTokenIdsCount()))
            .setText(response.getText().substring(characters))
            .build();
    shown[0] += fresh.getTokenIdsCount();
    shown[1] += fresh.getText().length();
    boolean isNew = fresh.getTokenIdsCount() > 0 || !fresh.getText().isEmpty() || fresh.hasFinish();
    return !isNew || show.test(fresh);
  }

  private static List<Any> details(StatusRuntimeException error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    return status == null ? List.of() : status.getDetailsList();
  }

  /** Returns the request field at fault; null if the server names none. */
  static String field(StatusRuntimeException error) throws InvalidProtocolBufferException {
    for (Any detail : details(error)) {
      if (detail.is(BadRequest.class)) {
        return detail.unpack(BadRequest.class).getFieldViolations(0).getField();
      }
    }
    return null;
  }

  /** Returns when to retry; null if the server says nothing about it. */
  static Double retrySeconds(StatusRuntimeException error) {
    try {
      for (Any detail : details(error)) {
        if (detail.is(RetryInfo.class)) {
          var delay = detail.unpack(RetryInfo.class).getRetryDelay();
          return delay.getSeconds() + delay.getNanos() / 1e9;
        }
      }
    } catch (InvalidProtocolBufferException unreadable) {
      return null;
    }
    return null;
  }

  public static void main(String[] arguments) throws Exception {
    String ca = null;
    String tokenFile = null;
    List<String> rest = new ArrayList<>();
    for (Iterator<String> each = List.of(arguments).iterator(); each.hasNext(); ) {
      String argument = each.next();
      switch (argument) {
        case "--ca" -> ca = each.next();
        case "--token-file" -> tokenFile = each.next();
        default -> rest.add(argument);
      }
    }
    ManagedChannel channel = channel(rest.isEmpty() ? "127.0.0.1:50051" : rest.get(0), ca);
    Chat chat = new Chat(connect(channel, tokenFile));
    String content = rest.size() > 1 ? rest.get(1) : "Who art thou?";
    ChatRequest request =
        ChatRequest.newBuilder()
            .addMessages(ChatMessage.newBuilder().setRole("user").setContent(content))
            .setSampling(SamplingParams.newBuilder().setMaxTokens(200))
            .build();

    System.out.println("# A chat. Restart a replica meanwhile: it goes on where it was.");
    chat.streamAgain(
        request,
        response -> {
          System.out.print(response.getText());
          System.out.flush();
          if (response.hasFinish()) {
            System.out.println("\n[" + response.getFinish().getReason() + "]");
          }
          return true;
        });

    System.out.println("# Another one, cancelled after its first message: the server frees its pages at once.");
    chat.stream(
        request,
        response -> {
          System.out.println(response.getText() + "...");
          return false;
        });

    System.out.println("# A refused one.");
    SamplingParams refused = SamplingParams.newBuilder().setTemperature(-1).build();
    try {
      chat.stream(request.toBuilder().setSampling(refused).build(), response -> true);
    } catch (StatusRuntimeException error) {
      System.out.println("field " + field(error) + ": " + error.getStatus().getDescription());
    }
    channel.shutdown();
  }
}
